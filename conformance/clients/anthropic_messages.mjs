// The `@anthropic-ai/sdk` package: `whole`, or `stream` with its helper.

import Anthropic from "@anthropic-ai/sdk";
import { DESCRIPTION, MODEL, NAME, PARAMETERS, ROUNDS, SYSTEM, calculate, done, questions } from "./calculator.mjs";

const client = new Anthropic();
const tools = [{ name: NAME, description: DESCRIPTION, input_schema: PARAMETERS }];
const messages = [];

function ask() {
  const asked = { model: MODEL, max_tokens: 128, system: SYSTEM, messages, tools };
  return process.argv[2] === "stream" ? client.messages.stream(asked).finalMessage() : client.messages.create(asked);
}

let reply;
for (const question of questions) {
  messages.push({ role: "user", content: question });
  for (let round = 0; round < ROUNDS; round++) {
    reply = await ask();
    messages.push({ role: "assistant", content: reply.content });
    const calls = reply.content.filter((block) => block.type === "tool_use");
    if (!calls.length) break;
    const results = calls.map(({ id, input }) => ({
      type: "tool_result",
      tool_use_id: id,
      content: calculate(String(input.expression)),
    }));
    messages.push({ role: "user", content: results });
  }
}
done(reply.content.map((block) => block.text ?? "").join(""));
