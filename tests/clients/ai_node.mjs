// Vercel's ai for Node, as responses and as chats: whole, streamed, tools, objects, a second turn. Run by run.py.
// The server needs a chat template with tools (--chat-template hermes) and minispec[grammar]. Without store: false the
// package refers to its earlier turns of responses by their ids, and nothing is stored.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const place = { baseURL: process.argv[2] + "/v1", apiKey: "None" };
const openai = createOpenAI(place);
const compatible = createOpenAICompatible({ ...place, name: "minispec", supportsStructuredOutputs: true });
const user = { role: "user", content: "Count from one to five." };
const ask = { role: "user", content: "What is 2 and 3?" };
const numbers = z.object({ a: z.number().int(), b: z.number().int() });
const tools = { add: tool({ description: "Add two numbers.", inputSchema: numbers, execute: ({ a, b }) => a + b }) };
const town = z.object({ name: z.string().max(12), large: z.boolean() });

for (const model of [openai.responses("default"), openai.chat("default"), compatible("default")]) {
  const more = { model, temperature: 0, maxRetries: 0, providerOptions: { openai: { store: false } } };
  const whole = await generateText({ ...more, messages: [user], maxOutputTokens: 24 });
  assert(whole.text && whole.usage.outputTokens <= 24);
  assert.equal(await streamText({ ...more, messages: [user], maxOutputTokens: 24 }).text, whole.text);
  const turns = [user, ...whole.response.messages, { role: "user", content: "Go on." }];
  const second = await generateText({ ...more, messages: turns, maxOutputTokens: 24 });
  assert(second.usage.inputTokens > whole.usage.inputTokens + whole.usage.outputTokens);

  const called = await generateText({ ...more, messages: [ask], tools, toolChoice: "required", maxOutputTokens: 80 });
  assert(called.toolResults.length > 0 && called.toolResults.every((made) => Number.isInteger(made.output)));
  const forced = streamText({ ...more, messages: [ask], tools, toolChoice: { type: "tool", toolName: "add" }, maxOutputTokens: 80 });
  assert.deepEqual((await forced.toolCalls).map((made) => made.toolName), ["add"]);
  const after = await generateText({ ...more, messages: [ask, ...called.response.messages], tools, toolChoice: "none", maxOutputTokens: 24 });
  assert(after.text);

  assert(town.parse((await generateObject({ ...more, prompt: "Name a town.", schema: town })).object));
  await assert.rejects(generateText({ ...more, prompt: "a", topP: 7 }), (error) => error.statusCode === 400 && /top_p/.test(error.message));
}
const store = { model: openai.responses("default"), prompt: "a", maxRetries: 0, providerOptions: { openai: { store: true } } };
await assert.rejects(generateText(store), (error) => error.statusCode === 400);
const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
const names = ["@ai-sdk/openai", "@ai-sdk/openai-compatible"].map((name) => `${name} ${version(name)}`);
console.log("ai", version("ai"), "with", ...names, "on", process.version, "ok");
