// `@openai/agents`, which sends the history of a run back: `chat` or `responses`.

import { Agent, MaxTurnsExceededError, OpenAIProvider, Runner, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";
import { DESCRIPTION, MODEL, NAME, ROUNDS, SYSTEM, calculate, done, questions } from "./calculator.mjs";

setTracingDisabled(true);
const parameters = z.object({ expression: z.string().describe("The expression, such as (12 + 7) * 3.") });
const execute = async ({ expression }) => calculate(expression);
const calculator = tool({ name: NAME, description: DESCRIPTION, parameters, execute });
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const modelProvider = new OpenAIProvider({ baseURL, apiKey, useResponses: process.argv[2] === "responses" });
const agent = new Agent({ name: "calc", instructions: SYSTEM, tools: [calculator], model: MODEL });
const runner = new Runner({ modelProvider });
let history = [];
let answer = "";
for (const content of questions) {
  try {
    const result = await runner.run(agent, [...history, { role: "user", content }], { maxTurns: ROUNDS });
    history = result.history;
    answer = result.finalOutput;
  } catch (error) {
    // After so many calls the next question comes.
    if (!(error instanceof MaxTurnsExceededError)) throw error;
  }
}
done(String(answer ?? ""));
