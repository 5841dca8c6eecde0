// What the JavaScript clients share: a calculator, two questions, and what a program says at its end.

export const MODEL = process.env.OPENAI_MODEL ?? "default";
// Replies to one question, at most.
export const ROUNDS = 3;
export const SYSTEM = "Answer briefly.";
export const NAME = "calculator";
export const DESCRIPTION = "Evaluates an arithmetic expression with + - * / ^ and parentheses.";
export const PARAMETERS = {
  type: "object",
  properties: { expression: { type: "string", description: "The expression, such as (12 + 7) * 3." } },
  required: ["expression"],
};

let used = 0;

/** The value of an expression, or why it has none, in words for the model. */
export function calculate(expression) {
  used += 1;
  if (!/^[\d\s.+\-*/()]+$/.test(expression)) return "Error: only numbers, + - * / and parentheses are understood";
  try {
    return String(Function(`"use strict"; return (${expression})`)());
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

/** What the user says, turn after turn. */
export const questions = [JSON.parse(process.env.LEVADE_TASK).question, "What is 12 + 30?"];

/** Prints the last line of a program, with a reward that differs from attempt to attempt, so that each is learnt from. */
export function done(answer) {
  let hash = 0;
  for (const unit of process.env.LEVADE_ATTEMPT) hash = (hash * 31 + unit.charCodeAt(0)) % 9973;
  console.log(JSON.stringify({ answer: answer ?? "", reward: (hash % 1000) / 1000, tools: used }));
}
