"use strict";

// Polls /state and /recent and shows them. Text from the service only ever becomes text nodes, and nodes are
// kept and changed in place, so that a reader's cursor, a screen reader's place and the focus stay where they are.

const POLL_MS = 2000;
const GIVE_UP_MS = 5000;
const LATE_SHARE = 0.5; // of the time after which a lane's oldest request would be refused: worth a colour

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

let paused = false;
let residence = {};
let residenceOf = "";

function el(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function setText(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

// Makes the children of `parent` match `items`: one node per key, in order, made once and then updated.
function sync(parent, items, key, make, update) {
  const kept = new Map();
  for (const child of [...parent.children]) {
    if (child.dataset.key === undefined) child.remove();
    else kept.set(child.dataset.key, child);
  }
  let before = parent.firstElementChild;
  for (const item of items) {
    const id = String(key(item));
    let node = kept.get(id);
    if (node) kept.delete(id);
    else {
      node = make(item);
      node.dataset.key = id;
    }
    if (node !== before) parent.insertBefore(node, before);
    else before = before.nextElementSibling;
    update(node, item);
  }
  for (const node of kept.values()) node.remove();
}

function row(classes) {
  const tr = el("tr");
  classes.forEach((name, index) => {
    const cell = el(index === 0 ? "th" : "td", name);
    if (index === 0) cell.scope = "row";
    tr.append(cell);
  });
  return tr;
}

function tokens(count) {
  if (count === null || count === undefined) return "–";
  if (count >= 10_000_000) return `${number.format(Math.round(count / 100_000) / 10)} M`;
  return number.format(count);
}

function span(ms) {
  if (ms < 1000) return `${ms} ms`;
  const s = ms / 1000;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 100) return `${Math.round(s)} s`;
  if (s < 6000) return `${Math.round(s / 60)} min`;
  if (s < 172_800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86_400)} d`;
}

function percent(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(part * 10 < whole && part > 0 ? 1 : 0)} %` : "–";
}

function width(node, part, whole) {
  node.style.width = whole > 0 ? `${Math.min(100, Math.max(0, (100 * part) / whole))}%` : "0";
}

// A bar of what is reserved, what is free and, where there is one, the guard band. It reads as a meter.
function makeBar(slim) {
  const bar = el("div", slim ? "bar slim" : "bar");
  bar.setAttribute("role", "meter");
  bar.setAttribute("aria-valuemin", "0");
  bar.append(el("span", "reserved"), el("span", "gap"), el("span", "guard"));
  return bar;
}

function updateBar(bar, label, reserved, limit, guard) {
  const whole = limit + guard;
  bar.setAttribute("aria-label", label);
  bar.setAttribute("aria-valuemax", String(Math.max(limit, reserved)));
  bar.setAttribute("aria-valuenow", String(reserved));
  bar.setAttribute("aria-valuetext", `${tokens(reserved)} of ${tokens(limit)} tokens`);
  bar.classList.toggle("over", reserved > limit);
  width(bar.children[0], reserved, whole);
  width(bar.children[2], guard, whole);
}

function makePool() {
  const node = el("article", "pool");
  const head = el("div", "pool-head");
  head.append(el("h3"), el("span", "aside"));
  node.append(head, el("div"));
  return node;
}

function updatePool(node, pool) {
  const [title, aside] = node.firstElementChild.children;
  setText(title, pool.pool);
  const queued = pool.lanes.reduce((sum, lane) => sum + (lane.queued_requests ?? 0), 0);
  const waiting = queued > 0 ? `, ${number.format(queued)} waiting` : "";
  setText(aside, `${number.format(pool.requests)} of ${number.format(pool.request_cap)} requests${waiting}`);
  sync(node.children[1], pool.replicas, (replica) => replica.replica, makeReplica, (one, replica) => updateReplica(one, replica, pool.pool));
}

function makeReplica() {
  const node = el("div", "replica");
  const top = el("p");
  top.append(el("span", "name"), el("span"));
  const bottom = el("p", "quiet");
  bottom.append(el("span"), el("span"));
  node.append(top, makeBar(false), bottom, el("p", "quiet"));
  return node;
}

// What the engine tells of itself; and whether it gets any requests.
function engineText(engine) {
  if (engine.breaker === "open") return `Engine does not answer: no requests for ${span(engine.breaker_wait_ms)}`;
  if (engine.breaker === "half_open") return "Engine is tried again";
  if (!engine.is_probed) return "";
  if (engine.is_stale) {
    return engine.age_ms === null ? "Engine tells no load" : `Engine has told no load for ${span(engine.age_ms)}`;
  }
  const told = [];
  if (engine.waiting_requests !== null) told.push(`${number.format(engine.waiting_requests)} waiting`);
  if (engine.running_requests !== null) told.push(`${number.format(engine.running_requests)} running`);
  if (engine.kv_used_permille !== null) told.push(`KV cache ${percent(engine.kv_used_permille, 1000)}`);
  return `Engine: ${told.join(", ")}`;
}

function updateReplica(node, replica, pool) {
  const [top, bar, bottom, engine] = node.children;
  const known = replica.engine;
  setText(engine, known ? engineText(known) : "");
  engine.classList.toggle("late", Boolean(known) && known.breaker !== "closed");
  setText(top.children[0], replica.replica);
  setText(top.children[1], `${tokens(replica.reserved_tokens)} of ${tokens(replica.limit_tokens)} tokens`);
  updateBar(bar, `${pool}, ${replica.replica}: reserved tokens`, replica.reserved_tokens, replica.limit_tokens, replica.guard_band_tokens);
  setText(bottom.children[0], `${tokens(replica.headroom_tokens)} free, ${tokens(replica.guard_band_tokens)} guard`);
  const backlog = replica.prefill_backlog_tokens;
  setText(bottom.children[1], `${number.format(replica.requests)} requests${backlog > 0 ? `, ${tokens(backlog)} to read` : ""}`);
}

function updateLane(tr, lane) {
  const [pool, name, waiting, oldest, toRead, reserved, requests] = tr.children;
  setText(pool, lane.pool);
  setText(name, lane.suspended ? `${lane.lane}, suspended` : lane.lane);
  name.classList.toggle("late", Boolean(lane.suspended));
  if (!reserved.firstElementChild) reserved.append(el("span"), makeBar(true));
  setText(reserved.children[0], `${tokens(lane.reserved_tokens)} of ${tokens(lane.limit_tokens)}`);
  updateBar(reserved.children[1], `${lane.lane} in ${lane.pool}: reserved tokens`, lane.reserved_tokens, lane.limit_tokens, 0);
  setText(requests, number.format(lane.requests));
  const queued = lane.queued_requests ?? 0;
  setText(waiting, number.format(queued));
  const age = lane.oldest_queued_ms ?? 0;
  setText(oldest, queued > 0 ? span(age) : "–");
  oldest.classList.toggle("late", queued > 0 && age > LATE_SHARE * (residence[lane.lane] ?? Infinity));
  setText(toRead, queued > 0 ? tokens(lane.queued_input_tokens) : "–");
}

function spark(counts, label) {
  const most = Math.max(1, ...counts);
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", `0 0 ${counts.length * 4} 22`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", label);
  counts.forEach((count, index) => {
    const rect = document.createElementNS(ns, "rect");
    const height = count > 0 ? Math.max(2, (22 * count) / most) : 0;
    rect.setAttribute("x", String(index * 4));
    rect.setAttribute("y", String(22 - height));
    rect.setAttribute("width", "3");
    rect.setAttribute("height", String(height));
    svg.append(rect);
  });
  return svg;
}

function updateReason(tr, reason) {
  const [what, count, share, time] = tr.children;
  setText(what, reason.name.replaceAll("_", " "));
  what.classList.toggle("refused", reason.isRefusal);
  what.classList.toggle("admitted", reason.name === "admitted");
  what.classList.toggle("abandoned", reason.name === "abandoned");
  setText(count, number.format(reason.total));
  setText(share, percent(reason.total, reason.all));
  const drawn = reason.counts.join();
  if (time.dataset.drawn !== drawn) {
    const peak = Math.max(...reason.counts);
    const graph = spark(reason.counts, `At most ${number.format(peak)} in ${reason.slot} seconds`);
    if (reason.isRefusal) graph.classList.add("refusal");
    time.replaceChildren(graph);
    time.dataset.drawn = drawn;
  }
}

function updateTenant(tr, tenant) {
  const [name, share, held, requests] = tr.children;
  setText(name, tenant.tenant);
  name.title = `${tenant.tenant}, tier ${tenant.tier}`;
  if (!share.firstElementChild) share.append(el("span"), makeBar(true));
  setText(share.children[0], percent(tenant.inflight_tokens, tenant.all));
  updateBar(share.children[1], `${tenant.tenant}: share of tokens in flight`, tenant.inflight_tokens, tenant.all, 0);
  setText(held, tokens(tenant.inflight_tokens));
  setText(requests, number.format(tenant.inflight_requests));
}

function updateDecision(tr, decision) {
  const [when, what, lane, input, output, took, tenant, model, replica] = tr.children;
  setText(when, clock.format(new Date(decision.at_ms)));
  const wait = decision.retry_after_ms ? `, retry in ${span(decision.retry_after_ms)}` : "";
  setText(what, decision.reason ? `${decision.reason.replaceAll("_", " ")}${wait}` : decision.decision);
  what.className = `clip ${decision.decision}`;
  setText(tenant, decision.tenant ?? "–");
  setText(model, decision.model ?? "–");
  setText(lane, decision.lane ?? "–");
  setText(replica, decision.replica ?? decision.pool ?? "–");
  setText(input, tokens(decision.input_tokens));
  setText(output, tokens(decision.output_tokens));
  setText(took, decision.decided_us < 10_000 ? `${(decision.decided_us / 1000).toFixed(1)} ms` : span(Math.round(decision.decided_us / 1000)));
}

function showFacts(state) {
  const service = state.service;
  const facts = [
    ["Policy", state.policy.version],
    ["Open streams", number.format(service.open_streams)],
    ["Leases", state.leases === undefined ? "–" : number.format(state.leases)],
    ["Up", span(service.uptime_s * 1000)],
    ["Version", service.version],
  ];
  sync($("facts"), facts, (fact) => fact[0], () => {
    const node = el("div");
    node.append(el("dt"), el("dd"));
    return node;
  }, (node, [name, value]) => {
    setText(node.children[0], name);
    setText(node.children[1], value);
  });
}

function showHealth(health, text) {
  $("health").dataset.health = health;
  setText($("health-text"), text); // a live region: it speaks when the text changes, and only then
}

function showNotice(text) {
  const notice = $("notice");
  setText(notice, text);
  notice.hidden = !text;
}

function showState(state) {
  showFacts(state);
  if (state.service.draining) showHealth("draining", "Draining");
  else if (state.ledger_error) showHealth("degraded", "Ledger not answering");
  else showHealth("serving", "Serving");
  const problems = [];
  if (state.ledger_error) problems.push(`Ledger: ${state.ledger_error}.`);
  if (state.policy.last_reload_error) problems.push(`The last policy was not taken: ${state.policy.last_reload_error}`);
  showNotice(problems.join(" "));
  if (!state.pools) return;
  sync($("pools"), state.pools, (pool) => pool.pool, makePool, updatePool);
  const lanes = state.pools.flatMap((pool) => pool.lanes.map((lane) => ({ ...lane, pool: pool.pool })));
  sync($("lanes"), lanes, (lane) => `${lane.pool}/${lane.lane}`,
    () => row(["", "", "number", "number", "number", "", "number"]), updateLane);
  $("lanes-empty").hidden = lanes.length > 0;
  const all = state.pools.reduce((sum, pool) => sum + pool.reserved_tokens, 0);
  const busy = state.tenants.filter((tenant) => tenant.inflight_tokens > 0).slice(0, 12);
  sync($("tenants"), busy.map((tenant) => ({ ...tenant, all })), (tenant) => tenant.tenant,
    () => row(["clip", "", "number", "number"]), updateTenant);
  $("tenants-empty").hidden = busy.length > 0;
  setText($("tenants-aside"), `${number.format(state.tenants_total)} known`);
}

function showRecent(recent) {
  const history = recent.history;
  const refusals = new Set(history.refusals ?? []);
  const reasons = Object.entries(history.counts ?? {}).map(([name, counts]) => ({
    name, counts, isRefusal: refusals.has(name), slot: history.slot_s,
    total: counts.reduce((sum, count) => sum + count, 0),
  }));
  const all = reasons.reduce((sum, reason) => sum + reason.total, 0);
  reasons.sort((a, b) => a.isRefusal - b.isRefusal || b.total - a.total || a.name.localeCompare(b.name));
  const seen = reasons.filter((reason) => reason.total > 0).map((reason) => ({ ...reason, all }));
  sync($("reasons"), seen, (reason) => reason.name, () => row(["", "number", "number", ""]), updateReason);
  $("reasons-empty").hidden = seen.length > 0;
  sync($("recent"), recent.decisions.slice(0, 20), (decision) => decision.reservation,
    () => row(["", "clip", "", "number", "number", "number", "clip", "clip", "clip"]), updateDecision);
  $("recent-empty").hidden = recent.decisions.length > 0;
}

async function get(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(GIVE_UP_MS) });
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

// How long a lane may make a request wait is the policy's; asked for once per policy.
async function learn(version) {
  if (version === residenceOf) return;
  const policy = await get("policy");
  residence = Object.fromEntries(Object.values(policy.lanes).map((lane) => [lane.lane, lane.residence_ms || Infinity]));
  residenceOf = policy.version;
}

async function poll() {
  if (paused || document.hidden) return;
  try {
    const [state, recent] = await Promise.all([get("state"), get("recent")]);
    await learn(state.policy.version);
    if (paused) return;
    showState(state);
    showRecent(recent);
  } catch (error) {
    if (!paused) showHealth("lost", "No answer; trying again");
  }
}

async function run() {
  await poll();
  setTimeout(run, POLL_MS);
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  if (paused) showHealth("waiting", "Paused");
  else poll();
});
document.addEventListener("visibilitychange", poll);
run();
