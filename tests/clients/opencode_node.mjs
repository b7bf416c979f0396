// OpenCode runs a command that the model calls, hands its output back, and ends with the model's answer.
//   python tests/clients/scripted.py --call '{"name": "bash", "arguments": {"command": "echo hi > made.txt", "description": "x"}}'
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const url = process.argv[2], home = mkdtempSync(join(tmpdir(), "opencode-")), work = join(home, "work");
mkdirSync(work);
writeFileSync(join(work, "opencode.json"), JSON.stringify({
  provider: { here: { npm: "@ai-sdk/openai-compatible", name: "here", options: { baseURL: `${url}/v1` },
    models: { any: { name: "any" } } } },
}));
const ran = spawnSync(
  join(import.meta.dirname, "node_modules", ".bin", "opencode"), ["run", "-m", "here/any", "Make the file."],
  { cwd: work, encoding: "utf8", timeout: 150_000, input: "", env: { ...process.env, HOME: home, PWD: work, XDG_CONFIG_HOME: home,
    XDG_DATA_HOME: home, XDG_CACHE_HOME: home, XDG_STATE_HOME: home } },
);
console.log(ran.stdout.slice(-4000), ran.stderr.slice(-4000));
assert.equal(ran.status, 0);
assert.ok(existsSync(join(work, "made.txt")), "the command was run");
assert.match(ran.stdout, /all is well/);
