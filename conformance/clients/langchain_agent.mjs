// An agent of LangChain's JavaScript packages: `chat` or `responses`.

import { MemorySaver } from "@langchain/langgraph";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, tool } from "langchain";
import { z } from "zod";
import { DESCRIPTION, MODEL, NAME, SYSTEM, calculate, done, questions } from "./calculator.mjs";

const schema = z.object({ expression: z.string().describe("The expression, such as (12 + 7) * 3.") });
const calculator = tool(({ expression }) => calculate(expression), { name: NAME, description: DESCRIPTION, schema });
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const useResponsesApi = process.argv[2] === "responses";
const model = new ChatOpenAI({ model: MODEL, apiKey, useResponsesApi, configuration: { baseURL } });
const checkpointer = new MemorySaver();
const agent = createAgent({ model, tools: [calculator], systemPrompt: SYSTEM, checkpointer });
const settings = { configurable: { thread_id: "one" }, recursionLimit: 12 };
let answer;
for (const content of questions) {
  try {
    const state = await agent.invoke({ messages: [{ role: "user", content }] }, settings);
    answer = state.messages.at(-1).text;
  } catch (error) {
    if (error.name !== "GraphRecursionError") throw error; // after so many calls the next question comes
  }
}
done(answer);
