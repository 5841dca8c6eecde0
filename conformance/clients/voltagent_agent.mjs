// An agent of VoltAgent with its own memory, over a provider of Vercel's AI SDK.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Agent, createTool } from "@voltagent/core";
import { z } from "zod";
import { DESCRIPTION, MODEL, NAME, ROUNDS, SYSTEM, calculate, done, questions } from "./calculator.mjs";

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const parameters = z.object({ expression: z.string().describe("The expression, such as (12 + 7) * 3.") });
const agent = new Agent({
  name: "solver",
  instructions: SYSTEM,
  model: createOpenAICompatible({ name: "levade", baseURL, apiKey })(MODEL),
  tools: [
    createTool({
      name: NAME,
      description: DESCRIPTION,
      parameters,
      execute: async ({ expression }) => calculate(expression),
    }),
  ],
  maxSteps: ROUNDS,
});
let text;
for (const question of questions) {
  ({ text } = await agent.generateText(question, { userId: "user", conversationId: "one" }));
}
done(text);
process.exit(0);
