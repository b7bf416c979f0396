// Codex runs a command that the model calls, hands its output back, and ends with the model's answer.
//   python tests/clients/scripted.py --call '{"name": "exec_command", "arguments": {"cmd": "echo hi > made.txt"}}'
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const url = process.argv[2], home = mkdtempSync(join(tmpdir(), "codex-")), work = join(home, "work");
mkdirSync(work);
writeFileSync(join(home, "config.toml"), `model = "any"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "${url}/v1"
wire_api = "responses"
`);
const ran = spawnSync(
  join(import.meta.dirname, "node_modules", ".bin", "codex"),
  ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", "Make the file."],
  { cwd: work, encoding: "utf8", timeout: 150_000, input: "", env: { ...process.env, HOME: home, CODEX_HOME: home } },
);
console.log(ran.stdout.slice(-4000), ran.stderr.slice(-2000));
assert.equal(ran.status, 0);
assert.ok(existsSync(join(work, "made.txt")), "the command was run");
assert.match(ran.stdout, /all is well/);
