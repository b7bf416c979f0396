// OpenAI's client for Node against a server: whole, streamed, tools, errors. Run by run.py.
import assert from "node:assert";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "None", maxRetries: 0 });
const messages = [{ role: "user", content: "Count from one to five." }];
const wish = { model: "default", messages, temperature: 0, max_tokens: 24 };

const whole = await client.chat.completions.create(wish);
const text = whole.choices[0].message.content;
assert(text && whole.usage.completion_tokens <= 24);

let streamed = "", usage = null;
for await (const chunk of await client.chat.completions.create({ ...wish, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const tools = [{ type: "function", function: { name: "add", parameters: { type: "object", properties: { a: { type: "integer" } } } } }];
const final = await client.chat.completions.stream({ ...wish, tools }).finalChatCompletion();
assert(final.choices[0].finish_reason);
const made = [{ id: "call_1", type: "function", function: { name: "add", arguments: '{"a": 1}' } }];
const turn = [{ role: "assistant", content: null, tool_calls: made }, { role: "tool", tool_call_id: "call_1", content: "2" }];
const after = await client.chat.completions.create({ ...wish, messages: [...messages, ...turn], tools });
assert(after.usage.prompt_tokens > whole.usage.prompt_tokens);

const completion = await client.completions.create({ model: "default", prompt: "Once upon a time", max_tokens: 8 });
assert(completion.choices[0].text);
await assert.rejects(client.chat.completions.create({ ...wish, temperature: -1 }), (error) => error.status === 400 && error.param === "temperature");

const response = { model: "default", input: "Count from one to five.", temperature: 0, max_output_tokens: 24 };
const answer = await client.responses.create(response);
assert(answer.output_text && answer.usage.output_tokens <= 24);
assert.equal((await client.responses.stream(response).finalResponse()).output[0].content[0].text, answer.output_text);
await assert.rejects(client.responses.create({ ...response, store: true }), (error) => error.status === 400 && error.param === "store");
console.log("openai for Node", VERSION, "on", process.version, "ok");
