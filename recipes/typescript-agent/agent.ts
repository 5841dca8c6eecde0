// An agent in TypeScript: asks a model for the answer to a question, and lets it use a calculator.
//
//     OPENAI_BASE_URL=… OPENAI_API_KEY=… npx tsx agent.ts 'What is 12 * (3 + 4)?'

import OpenAI from "openai";

const calculator: OpenAI.ChatCompletionTool = {
  type: "function",
  function: {
    name: "calculator",
    description: "Evaluates an arithmetic expression with + - * / ^ and parentheses.",
    parameters: {
      type: "object",
      properties: { expression: { type: "string", description: "The expression, such as (12 + 7) * 3." } },
      required: ["expression"],
    },
  },
};

/** The value of an expression, or why it has none, in words for the model. */
function calculate(expression: string): string {
  const tokens = expression.match(/\d+(\.\d+)?|[-+*/^()]|\S/g) ?? [];
  let at = 0;
  const sum = (): number => {
    let value = product();
    while (tokens[at] === "+" || tokens[at] === "-") value += tokens[at++] === "+" ? product() : -product();
    return value;
  };
  const product = (): number => {
    let value = power();
    while (tokens[at] === "*" || tokens[at] === "/") value = tokens[at++] === "*" ? value * power() : value / power();
    return value;
  };
  const power = (): number => {
    if (tokens[at] === "-") return (at++, -power());
    const base = atom();
    return tokens[at] === "^" ? (at++, base ** power()) : base;
  };
  const atom = (): number => {
    const token = tokens[at++];
    if (token === "(") {
      const value = sum();
      if (tokens[at++] !== ")") throw new Error("a parenthesis is not closed");
      return value;
    }
    const value = Number(token);
    if (token === undefined || Number.isNaN(value)) throw new Error(`${token ?? "the end"} is no number`);
    return value;
  };
  try {
    const value = sum();
    if (at < tokens.length) throw new Error(`${tokens[at]} is not understood`);
    return String(value);
  } catch (error) {
    return `Error: ${(error as Error).message}`;
  }
}

const client = new OpenAI();
const model = process.env.OPENAI_MODEL ?? "default";
const messages: OpenAI.ChatCompletionMessageParam[] = [{ role: "user", content: process.argv[2] ?? "" }];
let answer = "";
for (let turn = 0; turn < 3; turn++) {
  const { choices } = await client.chat.completions.create({ model, messages, tools: [calculator] });
  const reply = choices[0].message;
  messages.push(reply);
  if (!reply.tool_calls?.length) {
    answer = reply.content ?? "";
    break;
  }
  for (const call of reply.tool_calls) {
    if (call.type !== "function") continue;
    const expression = String(JSON.parse(call.function.arguments).expression ?? "");
    messages.push({ role: "tool", tool_call_id: call.id, content: calculate(expression) });
  }
}
// One line, which is what the question's answer is looked for in.
console.log(answer.replace(/\s+/g, " ").trim());
