// Claude Code runs a command that the model calls, hands its output back, and ends with the model's answer.
//   python tests/clients/scripted.py --call '{"name": "Bash", "arguments": {"command": "echo hi > made.txt", "description": "x"}}'
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const url = process.argv[2], home = mkdtempSync(join(tmpdir(), "claude-")), work = join(home, "work");
mkdirSync(work);
const ran = spawnSync(
  join(import.meta.dirname, "node_modules", ".bin", "claude"),
  ["-p", "Make the file.", "--model", "any", "--allowedTools", "Bash", "--output-format", "json"],
  { cwd: work, encoding: "utf8", timeout: 150_000, input: "", env: { ...process.env, HOME: home,
    CLAUDE_CONFIG_DIR: home, ANTHROPIC_BASE_URL: url, ANTHROPIC_AUTH_TOKEN: "None",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", DISABLE_AUTOUPDATER: "1" } },
);
console.log(ran.stdout.slice(-4000), ran.stderr.slice(-2000));
assert.equal(ran.status, 0);
assert.ok(existsSync(join(work, "made.txt")), "the command was run");
assert.match(ran.stdout, /all is well/);
