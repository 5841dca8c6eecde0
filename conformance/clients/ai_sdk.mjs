// Vercel's AI SDK with its providers: `chat`, `compatible`, `compatible-stream`, `responses` or `messages`.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { DESCRIPTION, MODEL, NAME, ROUNDS, SYSTEM, calculate, done, questions } from "./calculator.mjs";

const mode = process.argv[2];
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const openai = () => createOpenAI({ baseURL, apiKey });
const model = {
  chat: () => openai().chat(MODEL),
  responses: () => openai()(MODEL),
  messages: () => createAnthropic({ baseURL, apiKey })(MODEL),
}[mode] ?? (() => createOpenAICompatible({ name: "levade", baseURL, apiKey })(MODEL));
const inputSchema = z.object({ expression: z.string().describe("The expression, such as (12 + 7) * 3.") });
const execute = async ({ expression }) => calculate(expression);
const asked = {
  model: model(),
  system: SYSTEM,
  tools: { [NAME]: tool({ description: DESCRIPTION, inputSchema, execute }) },
  stopWhen: stepCountIs(ROUNDS),
};
const messages = [];
let text;
for (const content of questions) {
  messages.push({ role: "user", content });
  const result = mode.endsWith("stream") ? streamText({ ...asked, messages }) : await generateText({ ...asked, messages });
  text = await result.text;
  messages.push(...(await result.response).messages);
}
done(text);
