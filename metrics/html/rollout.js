// One rollout of a report as nodes of the page. Whatever comes from a run becomes a text node, never markup.
// With viewer.js, which has the table of all, this makes the page's one script.
const $ = (id) => document.getElementById(id);
const FIRST = 6000, FOLD = 20000; // characters: past FOLD a text shows its FIRST ones, and the rest when asked

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

const parsed = new Promise((done) => document.readyState === "loading" ? addEventListener("DOMContentLoaded", done) : done());

// The chunks stand behind this script: what is not there yet is still being read.
async function inflate(id) {
  if (!$(id)) await parsed;
  const packed = atob($(id).textContent);
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return JSON.parse(await new Response(stream).text());
}

// Text as a terminal means it: colours become classes, other sequences go, what cannot be seen gets a sign.
const ESCAPES = /\x1b\[([0-9;:]*)m|\x1b\[[0-?]*[ -\/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[ -\/]*[0-~]/g;
const UNSEEN = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]/g;
const picture = (sign) => {
  const code = sign.charCodeAt(0);
  return code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "\u2421" : "\ufffd";
};
const visible = (text) => String(text).replace(/\r\n/g, "\n").replace(UNSEEN, picture);
let raw = false;

function put(node, text) {
  text = String(text);
  if (raw || !text.includes("\x1b")) { node.append(visible(text)); return node; }
  let from = 0, colour = "", bold = false;
  const add = (part) => {
    if (!part) return;
    const style = [colour, bold ? "ab" : ""].filter(Boolean).join(" ");
    node.append(style ? el("span", { class: style }, visible(part)) : visible(part));
  };
  for (const found of text.matchAll(ESCAPES)) {
    add(text.slice(from, found.index));
    from = found.index + found[0].length;
    if (found[1] === undefined) continue;
    for (const code of found[1].split(/[;:]/).map(Number)) {
      if (code === 0) { colour = ""; bold = false; }
      else if (code === 1) bold = true;
      else if (code === 22) bold = false;
      else if (code === 39) colour = "";
      else if ((code >= 30 && code < 38) || (code >= 90 && code < 98)) colour = "a" + code % 10;
    }
  }
  add(text.slice(from));
  return node;
}

function long(tag, attributes, text) {
  const node = el(tag, attributes);
  if (text.length <= FOLD) return put(node, text);
  put(node, text.slice(0, FIRST));
  const more = el("button", { type: "button", class: "more", click: () => { node.textContent = ""; put(node, text); more.remove(); } },
    `show all ${text.length.toLocaleString("en")} characters`);
  return el("div", {}, node, more);
}

const fold = (title, open, ...children) => el("details", { class: "fold", open }, el("summary", {}, title), ...children);
function lazily(title, make) {
  const node = fold(title, false);
  node.addEventListener("toggle", () => { if (node.open && node.childElementCount === 1) node.append(make()); });
  return node;
}
const time = (s) => s === null || s === undefined ? "-" : s < 1 ? `${Math.round(1000 * s)} ms` : s < 120 ? `${s.toFixed(1)} s`
  : s < 7200 ? `${Math.round(s / 60)} min` : `${Math.floor(s / 3600)} h ${String(Math.round(s % 3600 / 60)).padStart(2, "0")} min`;
const number = (n) => Number(n).toLocaleString("en", { maximumFractionDigits: 4 });

// The parts of a rollout ------------------------------------------------------------------------------------------
function rollout(i, one) {
  const outcome = all.outcome[i], again = () => open(i);
  const facts = [
    ["reward", all.reward[i] === null ? "none" : number(all.reward[i])], ["took", time(all.seconds[i])],
    ["turns", number(all.turns[i]) + (one.malformed_turns ? `, ${one.malformed_turns} malformed` : "")],
    ["commands", number(all.commands[i])],
    ["tokens", `${number(one.completion_tokens || 0)} sampled, ${number(one.prompt_tokens || 0)} read`],
    ["policy", one.policy], ["host", one.host], ["attempts", all.attempts[i]],
    ["cost", one.cost_usd ? "$" + number(one.cost_usd) : ""], ["lost to infra", one.infra_seconds ? time(one.infra_seconds) : ""],
    ["started", (one.started_at || "").slice(0, 19)], ["attempt", one.attempt_id], ["task digest", (one.task_digest || "").slice(0, 12)],
  ];
  return [
    el("button", { type: "button", class: "back", click: close }, "← all rollouts"),
    el("h3", { class: "title" }, el("bdi", {}, visible(all.task[i])), ` #${all.sample[i]} `,
      el("span", { class: "chip " + outcome }, outcome), " ", all.error_class[i] ? el("span", { class: "chip" }, all.error_class[i]) : ""),
    el("small", {}, el("bdi", {}, visible(all.agent[i])), all.draw[i] ? `, draw ${all.draw[i]}` : ""),
    el("div", { class: "actions" },
      el("button", { type: "button", click: () => step(-1) }, "↑ previous"), el("button", { type: "button", click: () => step(1) }, "↓ next"),
      el("button", { type: "button", click: () => window.print() }, "print"),
      el("label", {}, el("input", { type: "checkbox", checked: raw, change: (event) => { raw = event.target.checked; again(); } }), "control characters as they are")),
    el("dl", { class: "facts" }, facts.filter(([, value]) => value !== "" && value !== undefined && value !== null)
      .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(value))))),
    phases(one.phases),
    ...(one.evidence ? [evidence(one)] : []),
    ...(one.tries || []).length ? [fold(`${one.tries.length} attempt(s) before this one`, true, ...one.tries.map((attempt) =>
      el("p", { class: "note" }, `attempt ${attempt.number}: `, el("b", {}, attempt.error_class), ` after ${time(attempt.seconds)} on ${visible(attempt.host)}: `, visible(attempt.message))))] : [],
    ...verdict(one),
    ...conversation(one),
    one.extra && one.extra !== "{}" ? fold("extra", false, long("pre", {}, one.extra)) : "",
  ].filter(Boolean);
}

function phases(found) {
  const entries = Object.entries(found || {});
  const whole = entries.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!whole) return "";
  return el("div", {}, el("div", { class: "share", style: "height:8px" }, entries.map(([name, seconds], n) =>
    el("i", { class: "series" + n % 6, style: `flex-grow:${seconds / whole}`, title: `${name}: ${time(seconds)}` }))),
  el("p", { class: "keys" }, entries.map(([name, seconds], n) => el("span", { class: "key series" + n % 6 }, `${name} ${time(seconds)}`))));
}

function evidence(one) {
  const found = one.evidence, facts = [`${one.domain || ""} error`, `at ${one.stage || "?"}`, `said by ${found.said_by}`];
  if (found.status !== null) facts.push(`HTTP ${found.status}`);
  if (found.exit_code !== null) facts.push(`exit ${found.exit_code}`);
  if (found.oom_killed) facts.push("out of memory");
  if (found.seconds !== null) facts.push(time(found.seconds));
  return el("div", { class: "alert " + (one.domain || "") }, el("p", {}, visible(found.message)), el("small", {}, visible(facts.join(", "))),
    found.log_tail ? long("pre", {}, found.log_tail) : "", (found.also || []).map((also) => el("p", { class: "note" }, "also: " + visible(also))));
}

function verdict(one) {
  const rewards = [...(one.reward_steps || []).map((step) => ["step " + step.name, step.value]),
    ...(one.reward_values || []).map((entry) => [entry.name, entry.value])];
  const parts = [];
  if (rewards.length) parts.push(el("table", { class: "numbers" }, el("tbody", {}, rewards.map(([name, value]) =>
    el("tr", {}, el("td", {}, visible(name)), el("td", {}, typeof value === "number" ? number(value) : value))))));
  if ((one.skipped_steps || []).length) parts.push(el("p", { class: "note" }, "not run: " + visible(one.skipped_steps.join(", "))));
  if ((one.test_ids || []).length) parts.push(fold(`${one.test_ids.length + (one.more_test_ids || 0)} tests`, false,
    el("pre", {}, visible(one.test_ids.join("\n")) + (one.more_test_ids ? `\n... and ${one.more_test_ids} more` : ""))));
  if (one.verifier_output) parts.push(fold("what the verifier printed (its end)", true, long("pre", { class: "verifier" }, one.verifier_output)));
  if (!parts.length) return [];
  return [el("h4", {}, "Verifier", one.reward_source ? el("small", {}, ` reward from ${one.reward_source}`) : ""), ...parts];
}

function conversation(one) {
  const turns = one.turns || [], messages = one.messages || [], parts = [el("h4", {}, "Trajectory")];
  if (!turns.length && !messages.length) return [...parts, el("p", { class: "note" }, "No policy spoke in this rollout.")];
  const before = messages.filter((message) => message.turn === null && message.role !== "assistant");
  for (const message of before) parts.push(fold(message.role, before.length < 3 || message.role === "user", long("div", { class: "say" }, message.content || "")));
  for (const turn of turns) parts.push(turnOf(turn, one, messages.filter((message) => message.turn === (turn.index || 0))));
  return parts;
}

function turnOf(turn, one, messages) {
  const index = turn.index || 0, answer = messages.find((message) => message.role === "assistant") || {};
  const said = messages.filter((message) => message.role !== "assistant" && message.content);
  const version = turn.policy_version || 0, end = turn.policy_version_end || 0;
  const head = [el("b", {}, `Turn ${index + 1}`), turn.purpose && turn.purpose !== "act" ? turn.purpose : "",
    turn.prompt_tokens || turn.completion_tokens ? `${number(turn.prompt_tokens || 0)} → ${number(turn.completion_tokens || 0)} tokens` : "",
    turn.cached_tokens ? `${number(turn.cached_tokens)} cached` : "", turn.generate_seconds ? time(turn.generate_seconds) : "",
    turn.queue_seconds > 0.05 ? `waited ${time(turn.queue_seconds)}` : "", turn.finish_reason && turn.finish_reason !== "stop" ? turn.finish_reason : "",
    version || end ? `version ${version === end ? version : version + " to " + end}` : "", turn.malformed ? "malformed" : ""];
  const body = el("div", { class: "body" });
  if (answer.reasoning) body.append(fold("reasoning", true, long("div", { class: "say think" }, answer.reasoning)));
  if (turn.text) body.append(long("div", { class: "say" }, turn.text));
  for (const call of answer.tool_calls || []) body.append(el("div", { class: "call" }, el("small", {}, "calls ", el("b", {}, visible(call.name))), long("pre", {}, call.arguments || "")));
  for (const command of turn.commands || []) body.append(commandOf(command));
  if (said.length) body.append(fold(`what the policy was told (${said.length})`, !(turn.commands || []).length, ...said.map((message) =>
    el("div", {}, el("small", {}, message.role), long("pre", {}, message.content)))));
  const tokens = tokensOf(turn, one);
  if (tokens) body.append(tokens);
  return el("section", { class: "turn", "aria-label": `Turn ${index + 1}` }, el("header", {}, head.filter(Boolean).map((part) =>
    typeof part === "string" ? el("span", { class: part === "malformed" || part === "length" ? "bad" : null }, part) : part)), body);
}

function commandOf(command) {
  const bad = command.exit_code !== 0 && command.exit_code !== null, notes = [];
  if (command.timed_out) notes.push(el("b", { class: "bad" }, "timed out"));
  else if (bad) notes.push(el("b", { class: "bad" }, `exit ${command.exit_code}`));
  else if (!command.keys) notes.push(command.exit_code === null ? "never ended" : "exit 0");
  if (command.seconds) notes.push(time(command.seconds));
  if (command.omitted_bytes) notes.push(`${number(command.omitted_bytes)} bytes were not recorded`);
  if (command.note) notes.push(visible(command.note));
  const output = [command.stdout ? long("pre", {}, command.stdout) : "", command.stderr ? long("pre", { class: "err" }, command.stderr) : ""].filter(Boolean);
  return el("div", { class: "command" + (command.keys ? " keys" : "") }, long("pre", { class: "cmd" + (output.length ? "" : " only") }, command.command || ""),
    ...output, el("p", {}, notes.flatMap((note, n) => n ? [" · ", note] : [note])));
}

// The ids that were sampled in a turn, each as red as it was unlikely.
function tokensOf(turn, one) {
  const segment = turn.segment === undefined ? (turn.completion_len ? (one.segments || [])[0] : null) : (one.segments || [])[turn.segment];
  const start = turn.prompt_len || 0, count = turn.completion_len || 0;
  if (!segment || !count) return null;
  let before = 0;
  for (const [from, length] of segment.spans) before += Math.max(0, Math.min(length, start - from));
  const ids = segment.ids.slice(segment.all_ids ? start : before, (segment.all_ids ? start : before) + count);
  const logprobs = segment.logprobs.slice(before, before + count).map((value) => value === null ? null : -value / 1000);
  const known = logprobs.filter((value) => value !== null);
  const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  const title = `${number(count)} token ids` + (mean === null ? "" : `, mean log-probability ${mean.toFixed(3)} nat`)
    + (ids.length < count ? ` (${ids.length} of them on this page)` : "");
  return lazily(title, () => el("div", { class: "tokens" }, ids.map((id, n) => el("span", {
    style: `--h:${Math.round(100 * (1 - Math.exp(logprobs[n] ?? 0)))}`,
    title: logprobs[n] === null || logprobs[n] === undefined ? "" : `${logprobs[n].toFixed(3)} nat, ${(100 * Math.exp(logprobs[n])).toFixed(1)}%`,
  }, String(id)))));
}
