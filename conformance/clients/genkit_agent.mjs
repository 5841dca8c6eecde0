// A conversation of Genkit with its plugin for OpenAI's API.

import { openAICompatible } from "@genkit-ai/compat-oai";
import { genkit, z } from "genkit";
import { DESCRIPTION, MODEL, NAME, ROUNDS, SYSTEM, calculate, done, questions } from "./calculator.mjs";

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const ai = genkit({ plugins: [openAICompatible({ name: "here", apiKey, baseURL })] });
const inputSchema = z.object({ expression: z.string().describe("The expression, such as (12 + 7) * 3.") });
const calculator = ai.defineTool(
  { name: NAME, description: DESCRIPTION, inputSchema, outputSchema: z.string() },
  async ({ expression }) => calculate(expression),
);
let messages = [{ role: "system", content: [{ text: SYSTEM }] }];
let text;
for (const prompt of questions) {
  const said = await ai.generate({ model: `here/${MODEL}`, tools: [calculator], messages, prompt, maxTurns: ROUNDS });
  ({ messages, text } = said);
}
done(text);
