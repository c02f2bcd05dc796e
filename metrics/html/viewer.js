// The rollouts of a report: a list that draws only the rows in sight, filters and search, and what a reader's keys do.
// A rollout is inflated when it is opened; rollout.js shows it.
const OUTCOMES = ["passed", "failed", "invalid", "cancelled"];
const ROW = 58; // pixels, as the style sheet has it
let all = {}, size = 0, shown = [], selected = -1, opened = -1, haystack = [], deepHits = null, searching = 0;
const chunks = new Map();

async function chunk(index) {
  if (!chunks.has(index)) {
    if (chunks.size > 40) chunks.delete(chunks.keys().next().value);
    chunks.set(index, inflate("c" + index));
  }
  return chunks.get(index);
}

const ORDERS = {
  "as written": null,
  "reward, low first": (i) => all.reward[i] ?? -Infinity,
  "reward, high first": (i) => -(all.reward[i] ?? -Infinity),
  "longest first": (i) => -(all.seconds[i] ?? 0),
  "most turns first": (i) => -all.turns[i],
  "most tokens first": (i) => -all.tokens[i],
  "last ended first": (i) => -(all.ended[i] ?? 0),
};

function filter() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const task = $("task").value.trim(), agent = $("agent").value, outcome = $("outcome").value, cls = $("class").value;
  const exact = task && names.has(task);
  const found = [];
  for (let i = 0; i < size; i++) {
    if (outcome && all.outcome[i] !== outcome) continue;
    if (cls && all.error_class[i] !== cls) continue;
    if (agent && all.agent[i] !== agent) continue;
    if (task && (exact ? all.task[i] !== task : !all.task[i].toLowerCase().includes(task.toLowerCase()))) continue;
    if (words.length && !words.every((word) => haystack[i].includes(word)) && !(deepHits && deepHits.has(i))) continue;
    found.push(i);
  }
  const order = ORDERS[$("order").value];
  if (order) found.sort((a, b) => order(a) - order(b) || a - b);
  shown = found;
  selected = shown.indexOf(opened);
  $("found").textContent = `${found.length.toLocaleString("en")} of ${size.toLocaleString("en")}`;
  $("rows").style.height = `${found.length * ROW}px`;
  draw();
}

async function deep() {
  const mine = ++searching, words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  deepHits = null;
  if (!$("deep").checked || !words.length) return filter();
  deepHits = new Set();
  const last = size ? all.chunk[size - 1] : -1;
  for (let c = 0, i = 0; c <= last; c++) {
    const found = await (chunks.get(c) || inflate("c" + c));
    if (mine !== searching) return;
    for (const one of found) {
      const text = JSON.stringify(one, (key, value) => key === "segments" ? undefined : value).toLowerCase();
      if (words.every((word) => haystack[i].includes(word) || text.includes(JSON.stringify(word).slice(1, -1)))) deepHits.add(i);
      i++;
    }
    if (c % 20 === 19) { filter(); $("found").textContent += ` (${Math.round(100 * c / last)}% read)`; await new Promise(requestAnimationFrame); }
  }
  filter();
}

function draw() {
  const list = $("list"), from = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const to = Math.min(shown.length, from + Math.ceil((list.clientHeight || 600) / ROW) + 10);
  const rows = [];
  for (let at = from; at < to; at++) {
    const i = shown[at];
    rows.push(el("div", {
      class: "row", role: "option", id: "row" + at, style: `top:${at * ROW}px`, "aria-selected": String(at === selected),
      "aria-setsize": shown.length, "aria-posinset": at + 1, click: () => { pick(at); open(i); },
    },
    el("bdi", {}, visible(all.task[i])), el("span", { class: "chip " + all.outcome[i] }, all.outcome[i]),
    el("small", {}, `#${all.sample[i]}${all.draw[i] ? ` of draw ${all.draw[i]}` : ""}`, manyAgents ? ` · ${visible(all.agent[i])}` : "",
      all.error_class[i] ? ` · ${all.error_class[i]}` : "", all.attempts[i] > 1 ? ` · ${all.attempts[i]} attempts` : ""),
    el("small", {}, all.reward[i] === null ? "-" : number(all.reward[i]), ` · ${time(all.seconds[i])}`)));
  }
  $("rows").replaceChildren(...rows);
  list.setAttribute("aria-activedescendant", selected >= 0 ? "row" + selected : "");
}

function pick(at) {
  if (!shown.length) return;
  selected = Math.max(0, Math.min(shown.length - 1, at));
  const list = $("list"), top = selected * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  draw();
}

const address = (i) => "#rollout/" + [all.task[i], all.agent[i], all.draw[i], all.sample[i]].map(encodeURIComponent).join("/");

async function open(i, focus = true) {
  opened = i;
  const detail = $("detail");
  detail.setAttribute("aria-busy", "true");
  const one = (await chunk(all.chunk[i]))[all.at[i]];
  if (opened !== i) return;
  detail.replaceChildren(...rollout(i, one));
  detail.removeAttribute("aria-busy");
  detail.scrollTop = 0;
  $("panes").classList.add("open");
  history.replaceState(null, "", address(i));
  if (getComputedStyle($("list")).display === "none") detail.scrollIntoView();
  if (focus) detail.focus({ preventScroll: true });
}

function close() {
  $("panes").classList.remove("open");
  $("list").focus();
}

// What a reader does ----------------------------------------------------------------------------------------------
let names = new Set(), manyAgents = false;

function step(by) {
  if (!shown.length) return;
  pick(selected < 0 ? 0 : selected + by);
  open(shown[selected]);
}

function follow() {
  const [kind, ...parts] = location.hash.slice(1).split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  if (kind === "task" || kind === "class") {
    $("filters").reset();
    $(kind).value = parts.join("/");
    filter();
    if (shown.length) { pick(0); open(shown[0], false); }
    $("rollouts").scrollIntoView();
  } else if (kind === "rollout") {
    const [task, agent, draw, sample] = parts;
    let i = 0;
    while (i < size && !(all.task[i] === task && all.agent[i] === agent && all.draw[i] === +draw && all.sample[i] === +sample)) i++;
    if (i === size) return;
    if (shown.indexOf(i) < 0) { $("filters").reset(); filter(); }
    pick(shown.indexOf(i));
    open(i);
    $("rollouts").scrollIntoView();
  }
}

function options(select, values) {
  for (const value of values) select.append(el("option", { value }, visible(value)));
}

function allTasks() {
  const more = $("more-tasks");
  if (!more) return;
  document.querySelector("table.tasks tbody").append(more.content);
  more.remove();
  $("all-tasks").remove();
}

function sortable(table) {
  table.querySelectorAll("th[data-sort]").forEach((head) => {
    const column = head.cellIndex, button = el("button", { type: "button" }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      allTasks();
      const up = head.getAttribute("aria-sort") !== "ascending", body = table.tBodies[0];
      const key = (row) => { const cell = row.cells[column], value = cell.dataset.value ?? cell.textContent; return value === "" || isNaN(value) ? value : +value; };
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
      body.append(...[...body.rows].map((row) => [key(row), row]).sort((a, b) => (up ? 1 : -1) * order(a[0], b[0])).map(([, row]) => row));
    });
  });
}

function theme() {
  const button = $("theme"), kinds = ["auto", "light", "dark"];
  let at = 0;
  const show = () => {
    const kind = kinds[at];
    if (kind === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = kind;
    button.querySelector("span").textContent = kind;
    button.setAttribute("aria-label", "Colours: " + kind);
  };
  button.hidden = false;
  button.addEventListener("click", () => { at = (at + 1) % 3; show(); });
}

async function start() {
  theme();
  document.querySelectorAll("table.tasks").forEach(sortable);
  $("all-tasks")?.addEventListener("click", allTasks);
  all = await inflate("columns");
  size = (all.task || []).length;
  haystack = Array.from({ length: size }, (_, i) => `${all.task[i]} ${all.agent[i]} ${all.outcome[i]} ${all.error_class[i]} ${all.message[i]} #${all.sample[i]}`.toLowerCase());
  names = new Set(all.task);
  const agents = [...new Set(all.agent)].sort();
  manyAgents = agents.length > 1;
  $("agents").hidden = !manyAgents;
  options($("agent"), agents);
  options($("outcome"), OUTCOMES.filter((outcome) => (all.outcome || []).includes(outcome)));
  options($("class"), [...new Set(all.error_class)].filter(Boolean).sort());
  options($("order"), Object.keys(ORDERS));
  options($("task-names"), [...names].sort().slice(0, 2000));
  $("viewer").hidden = false;
  let waiting = 0;
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(deep, 120); };
  $("filters").addEventListener("input", (event) => event.target.id === "search" || event.target.id === "deep" ? soon() : filter());
  $("filters").addEventListener("reset", () => setTimeout(deep));
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("list").addEventListener("scroll", draw, { passive: true });
  addEventListener("resize", draw);
  $("list").addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor($("list").clientHeight / ROW) - 1);
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -shown.length, End: shown.length }[event.key];
    if (by) { pick(selected + by); event.preventDefault(); }
    else if (event.key === "Enter" && selected >= 0) open(shown[selected]);
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
    if (event.key === "Escape") { if (typing) document.activeElement.blur(); close(); }
    else if (typing) return;
    else if (event.key === "/") { $("search").focus(); event.preventDefault(); }
    else if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
  });
  addEventListener("hashchange", follow);
  addEventListener("beforeprint", allTasks);
  addEventListener("beforeprint", () => $("detail").querySelectorAll("details").forEach((node) => { node.open = true; }));
  filter();
  follow();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

start();
