// `@mastra/core` over a provider of the AI SDK. It makes one message of all replies to a question.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";
import { DESCRIPTION, MODEL, NAME, ROUNDS, SYSTEM, calculate, done, questions } from "./calculator.mjs";

const inputSchema = z.object({ expression: z.string().describe("The expression, such as (12 + 7) * 3.") });
const execute = async ({ context }) => calculate(context.expression);
const calculator = createTool({ id: NAME, description: DESCRIPTION, inputSchema, execute });
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const model = createOpenAICompatible({ name: "levade", baseURL, apiKey })(MODEL);
const agent = new Agent({ name: "calc", instructions: SYSTEM, model, tools: { [NAME]: calculator } });
const messages = [];
let text;
for (const content of questions) {
  messages.push({ role: "user", content });
  const result = await agent.generate(messages, { maxSteps: ROUNDS });
  text = result.text;
  messages.push(...result.response.messages);
}
done(text);
process.exit(0);
