// The `openai` package for Node over chat completions: `whole`, or `stream` with its helper.

import OpenAI from "openai";
import { DESCRIPTION, MODEL, NAME, PARAMETERS, ROUNDS, SYSTEM, calculate, done, questions } from "./calculator.mjs";

const client = new OpenAI();
const tools = [{ type: "function", function: { name: NAME, description: DESCRIPTION, parameters: PARAMETERS } }];
const messages = [{ role: "system", content: SYSTEM }];

async function ask() {
  const asked = { model: MODEL, messages, tools };
  const completion =
    process.argv[2] === "stream"
      ? await client.chat.completions.stream(asked).finalChatCompletion()
      : await client.chat.completions.create(asked);
  return completion.choices[0].message;
}

let reply;
for (const content of questions) {
  messages.push({ role: "user", content });
  for (let round = 0; round < ROUNDS; round++) {
    reply = await ask();
    messages.push(reply);
    if (!reply.tool_calls?.length) break;
    for (const call of reply.tool_calls) {
      const { expression } = JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: calculate(String(expression)) });
    }
  }
}
done(reply.content);
