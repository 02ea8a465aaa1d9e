// Script of the viewer: loads rows on demand, live messages, keyboard shortcuts, the chat box.
// This script never builds HTML from messages: the server renders and cleans messages.

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

// --- requests to the server -----------------------------------------------------------------

class GatewayUnreachable extends Error {
  constructor() { super("Can't reach the gateway."); }
}

async function request(address, options) {
  try {
    return await fetch(address, options);
  } catch {
    throw new GatewayUnreachable();
  }
}

// Shows or hides the notice "Reconnecting…". While the notice is shown, nothing can be sent.
function setConnected(isConnected) {
  $("#gone").hidden = isConnected;
  allowSend();
}

let sending = false;
function allowSend() {
  const button = $("#send");
  if (button) button.disabled = sending || !$("#gone").hidden || isDeleted();
}

function failure(words, { status, statusText }) {
  return Object.assign(new Error(words ?? statusText), { status });
}

async function html(address) {
  const response = await request(address, { headers: { Accept: "text/html" } });
  const made = new DOMParser().parseFromString(await response.text(), "text/html");
  if (!response.ok) throw failure($(".failure p", made)?.textContent, response);
  keepSources(made);
  return made;
}

// HTML of messages as the server sent it, to detect changes: the elements on the page may have been
// changed by a script or by the reader.
const sources = new WeakMap();
function keepSources(root) {
  for (const one of $$(".part > *", root)) sources.set(one, one.outerHTML);
}
keepSources(document);

async function api(method, address, body, tries = 4) {
  const response = await request(address, {
    method,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body ?? {}),
  });
  const reply = await response.json().catch(() => ({}));
  if (reply.error?.code === "busy" && tries > 1) {
    // An answer that has just ended is still being stored, so try again.
    await new Promise((go) => { setTimeout(go, 300); });
    return api(method, address, body, tries - 1);
  }
  if (!response.ok) throw failure(reply.error?.message, response);
  return reply;
}

let toastTimer;
function toast(words, bad = false, milliseconds = 6000) {
  const shown = $("#toast");
  shown.textContent = words;
  shown.classList.toggle("bad", bad);
  shown.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { shown.hidden = true; }, milliseconds);
}

// The other scripts show their notices with this event.
document.addEventListener("notice", ({ detail }) => {
  toast(detail.text, detail.bad, detail.milliseconds);
});

// Shows a notice on the next page instead of this page.
function noticeOnNextPage(words) {
  try { sessionStorage.setItem("told", words); } catch { /* without storage the notice is not shown */ }
}

try {
  const words = sessionStorage.getItem("told");
  sessionStorage.removeItem("told");
  if (words) toast(words);
} catch { /* this browser has no storage */ }

async function tryOrToast(act) {
  try {
    return await act();
  } catch (error) {
    toast(error.message, true);
    return undefined;
  }
}

// --- light, dark or as the system ---------------------------------------------------------------

const root = document.documentElement;

function showTheme() {
  const button = $("#theme");
  button.title = `Theme: ${root.dataset.theme ?? "system"}`;
  button.setAttribute("aria-label", button.title);
}

$("#theme").addEventListener("click", () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const other = system === "dark" ? "light" : "dark";
  const now = root.dataset.theme;
  // Each click selects the next of three choices: follow the system, the opposite theme, and the
  // system's present theme, fixed.
  const next = now === undefined ? other : now === other ? system : undefined;
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  showTheme();
  try {
    if (next) localStorage.setItem("theme", next);
    else localStorage.removeItem("theme");
  } catch { /* without storage the theme is kept only for this page */ }
});
showTheme();

// --- times and scrolling ------------------------------------------------------------------------

const two = (number) => String(number).padStart(2, "0");
const dayOf = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
const clockOf = (at) => `${two(at.getHours())}:${two(at.getMinutes())}`;
const whenIdle = globalThis.requestIdleCallback ?? ((act) => setTimeout(act, 100));

let zones;
function zoneOf(at) {
  zones ??= new Intl.DateTimeFormat("en", { timeZoneName: "short" });
  return zones.formatToParts(at).find((one) => one.type === "timeZoneName").value;
}

// Shows a time in the reader's time zone. The server renders times in UTC.
function showLocalTime(one) {
  const at = new Date(one.dateTime);
  if (!one.dateTime || Number.isNaN(at.valueOf())) return;
  // Wait for the first paint, because loading the names of the time zones takes 15 ms.
  whenIdle(() => {
    one.title = `${dayOf(at)} ${clockOf(at)}:${two(at.getSeconds())} ${zoneOf(at)}`;
  });
  const [, date, clock] = /^(\d{4}-\d\d-\d\d)? ?(\d\d:\d\d)?$/.exec(one.textContent) ?? [];
  if (clock) {
    const today = dayOf(at) === dayOf(new Date());
    one.textContent = today ? clockOf(at) : `${dayOf(at)} ${clockOf(at)}`;
  } else if (date) {
    one.textContent = dayOf(at);
  }
}

const matchesIn = (selector, one) => [one, ...$$(selector, one)]
  .filter((each) => each.matches?.(selector));

// Lets the keyboard scroll elements whose content is larger than their box.
function makeScrollable(within) {
  for (const one of matchesIn("pre, .words table", within)) {
    const larger = one.scrollHeight > one.clientHeight || one.scrollWidth > one.clientWidth;
    if (larger) one.tabIndex = 0;
  }
}

function prepareElements(within) {
  matchesIn("time", within).forEach(showLocalTime);
  makeScrollable(within);
}

// For a fast first paint, conversation.css lays out only messages in view. From now on, the
// positions of all messages are needed.
$("#talk")?.removeAttribute("data-first-paint");
prepareElements(document);
new MutationObserver((changes) => {
  for (const one of changes.flatMap((change) => [...change.addedNodes])) {
    if (one.nodeType === Node.ELEMENT_NODE && one.isConnected) prepareElements(one);
  }
}).observe(document.body, { childList: true, subtree: true });
document.addEventListener("toggle", (event) => makeScrollable(event.target), true);

const help = $("#help");
$("#help-button").addEventListener("click", () => help.showModal());

$("#log-out").addEventListener("click", async () => {
  try {
    await api("POST", "/logout");
    location.assign("/");
  } catch (error) {
    toast(error.message, true);
  }
});

// --- one question to the user -------------------------------------------------------------------

// Enter sends, Shift+Enter starts a new line, and Enter in an input method (IME) does not send.
const sendsOnEnter = (send) => (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};

// Shows a dialog with this content. The promise resolves to whether the reader chose the button
// with the label `does` instead of Cancel.
function askInDialog(content, does, ready = () => {}) {
  return new Promise((answer) => {
    const dialog = document.createElement("dialog");
    const question = content instanceof DocumentFragment ? content.firstElementChild : content;
    dialog.setAttribute("aria-label", question.textContent);
    const form = document.createElement("form");
    form.method = "dialog";
    const buttons = document.createElement("div");
    buttons.className = "acts";
    for (const [name, label] of [["ok", does], ["cancel", "Cancel"]]) {
      const button = document.createElement("button");
      button.value = name;
      button.textContent = label;
      buttons.append(button);
    }
    form.append(content, buttons);
    dialog.append(form);
    dialog.addEventListener("close", () => {
      answer(dialog.returnValue === "ok");
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
    ready($("button", buttons));
  });
}

// Other scripts of the page open a dialog with this event.
document.addEventListener("ask", ({ detail }) => {
  askInDialog(detail.content, detail.does, detail.ready).then(detail.answer);
});

async function askForText(words, value, { long = false, does = "Save", enter = !long } = {}) {
  const label = document.createElement("label");
  label.textContent = words;
  const input = document.createElement(long ? "textarea" : "input");
  input.value = value;
  label.append(input);
  const ok = await askInDialog(label, does, (button) => {
    if (enter) input.addEventListener("keydown", sendsOnEnter(() => button.click()));
    input.focus();
    if (!long) input.select();
  });
  return ok ? input.value : null;
}

function askToConfirm(words, does) {
  const text = document.createElement("p");
  text.textContent = words;
  return askInDialog(text, does);
}

// --- the list ---------------------------------------------------------------------------------

const found = $("#found");
let latestQuery = 0;
let moreRowsLoaded = false;

async function filterList(input) {
  const number = ++latestQuery;
  moreRowsLoaded = false;
  const fields = new URLSearchParams(new FormData(input.form));
  // Set the address first, so that a slow or failed response leaves a link that can be copied.
  history.replaceState(null, "", fields.size ? `/?${fields}` : "/");
  fields.set("part", "true");
  const made = await tryOrToast(() => html(`/?${fields}`));
  // A newer query has been sent: discard this late response.
  if (made === undefined || number !== latestQuery) return;
  const link = $(".chosen a", found)?.getAttribute("href");
  found.replaceChildren(...made.body.childNodes);
  // The totals ignore search words, so they are hidden during a search.
  $("#total").hidden = Boolean(fields.get("q")?.trim());
  const again = $$("[data-row]", found).find((row) => $("a", row).getAttribute("href") === link);
  if (again) markRow(again);
}

const nameOf = (row) => $("a", row)?.getAttribute("href") ?? row.className;

// Makes the list contain these rows in this order. Elements of unchanged rows stay on the page.
function updateRows(list, rows) {
  const known = new Map([...list.children].map((row) => [nameOf(row), row]));
  const focused = list.contains(document.activeElement) && document.activeElement;
  const [at, to] = focused ? [nameOf(focused.closest("li")), focused.getAttribute("href")] : [];
  rows.forEach((row, place) => {
    const old = known.get(nameOf(row));
    known.delete(nameOf(row));
    if (old && old.innerHTML !== row.innerHTML) old.replaceChildren(...row.childNodes);
    if (list.children[place] !== (old ?? row)) list.insertBefore(old ?? row, list.children[place]);
  });
  known.forEach((gone) => gone.remove());
  if (!focused || document.activeElement === focused) return;
  const row = [...list.children].find((one) => nameOf(one) === at);
  row && $$("a, button", row).find((one) => one.getAttribute("href") === to)
    ?.focus({ preventScroll: true });
}

// Updates the first rows, unless more rows were loaded. Only one request runs at a time.
const REFRESH_MILLISECONDS = 5000;
let refreshingList = false;
async function refreshList(input) {
  if (refreshingList || document.hidden || moreRowsLoaded || input.value) return;
  refreshingList = true;
  const number = latestQuery;
  const fields = new URLSearchParams(new FormData(input.form));
  fields.set("part", "true");
  try {
    const made = await html(`/?${fields}`);
    setConnected(true);
    if (number === latestQuery && !moreRowsLoaded && !input.value) {
      updateRows($(".sessions", found), [...$(".sessions", made).children]);
    }
  } catch (error) {
    if (error instanceof GatewayUnreachable) setConnected(false);
    else toast(error.message, true);
  } finally {
    refreshingList = false;
  }
}

if (found) {
  const input = $("#search");
  setInterval(() => refreshList(input), REFRESH_MILLISECONDS);
  let pause;
  input.addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(() => filterList(input), 120);
  });
  input.form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(pause);
    filterList(input);
  });
  // Update the list when the reader returns to the tab.
  let left = Infinity;
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { left = Date.now(); return; }
    if (!input.value) refreshList(input);
    else if (Date.now() - left > 10_000 && scrollY < 200) filterList(input);
  });
}

document.addEventListener("click", async (event) => {
  const more = event.target.closest("[data-more]");
  if (!more) return;
  more.disabled = true;
  const made = await tryOrToast(() => html(more.dataset.more));
  if (made === undefined) { more.disabled = false; return; }
  moreRowsLoaded = true;
  more.closest("li").replaceWith(...made.body.children);
});

const watchMore = new IntersectionObserver((seen) => {
  for (const one of seen) if (one.isIntersecting) one.target.click();
}, { rootMargin: "600px" });
if (found) {
  const watch = () => $$("[data-more]").forEach((one) => watchMore.observe(one));
  new MutationObserver(watch).observe(found, { childList: true, subtree: true });
  watch();
}

// --- the conversation -------------------------------------------------------------------------

// Names of the operations that can be undone.
const OPERATIONS = {
  checkpoint: "Summary",
  clear: "Clear",
  hide: "Hide",
  replace: "Edit or retry",
  summary: "Summary change",
  truncate: "Truncation",
};

function undoNotice({ op, shown }) {
  const done = `${OPERATIONS[op] ?? op} undone.`;
  if (!shown) return done;
  return `${done} ${shown === 1 ? "1 message is" : `${shown} messages are`} visible to the model again.`;
}

const session = $("#session");
const talk = $("#talk");
const { key, agent, path, api: base } = session?.dataset ?? {};
const ofAgent = (fields = {}) => {
  const named = new URLSearchParams(fields);
  if (agent && agent !== "main") named.set("agent", agent);
  const text = named.toString();
  return text ? `?${text}` : "";
};
// Query fields of requests for messages: whether to include hidden messages, and the filter.
const messageFields = () => ({
  ...Object.fromEntries(new URLSearchParams(talk?.dataset.filter)),
  ...(talk && talk.dataset.full !== talk.dataset.fullDefault ? { full: talk.dataset.full } : {}),
});
const articles = () => $$("article.message", talk);
const atEnd = () => innerHeight + scrollY >= document.documentElement.scrollHeight - 120;
const toEnd = () => scrollTo(0, document.documentElement.scrollHeight);

function loadPart(fields) {
  return html(`${path}/fragment${ofAgent({ ...messageFields(), ...fields })}`).then((made) => {
    const found = $(".part", made);
    if (!found) throw new Error("Unexpected response from the gateway. Reload the page.");
    return found;
  });
}

function addOlderButton() {
  const first = $(".part", talk);
  let button = $("#older");
  if (first.dataset.older !== "true") { button?.remove(); return; }
  if (button) return;
  button = document.createElement("button");
  button.id = "older";
  button.className = "small";
  button.textContent = "Older messages";
  button.addEventListener("click", async () => {
    if (button.disabled) return;
    button.disabled = true;
    const top = $(".part", talk);
    const made = await tryOrToast(() => loadPart({ before: top.dataset.first }));
    button.disabled = false;
    if (made === undefined || top !== $(".part", talk)) return;
    // Keep the scroll position.
    const read = messageBeingRead();
    const before = read?.getBoundingClientRect().top;
    button.remove();
    talk.prepend(made);
    addOlderButton();
    if (read) scrollBy(0, read.getBoundingClientRect().top - before);
  });
  talk.before(button);
}

function addNewerButton() {
  const last = $$(".part", talk).at(-1);
  let button = $("#newer");
  if (last.dataset.newer !== "true") { button?.remove(); return; }
  if (button) return;
  button = document.createElement("button");
  button.id = "newer";
  button.className = "small";
  button.textContent = "Newer messages";
  button.addEventListener("click", async () => {
    if (button.disabled) return;
    button.disabled = true;
    const end = $$(".part", talk).at(-1);
    const made = await tryOrToast(() => loadPart({ after: end.dataset.last, limit: 50 }));
    button.disabled = false;
    if (made === undefined || end !== $$(".part", talk).at(-1)) return;
    button.remove();
    talk.append(made);
    addNewerButton();
    if (!isOld()) follow();
  });
  talk.after(button);
}

// Copies the reader's state from the old element to the new one: selection, mark of a jump, and
// open details.
function keepReaderState(known, one) {
  if (known.classList.contains("arrived")) one.classList.add("arrived");
  if (known.classList.contains("chosen")) {
    one.classList.add("chosen");
    one.setAttribute("aria-current", "true");
    one.tabIndex = 0;
  }
  const open = $$("details", known).map((each) => each.open);
  $$("details", one).forEach((each, at) => { each.open = open[at] ?? false; });
}

// Makes screen readers read out new messages. The conversation itself is not a live region, because
// older messages that are loaded later must not be read out.
const MAX_ANNOUNCED = 2000;
function announce(messages) {
  const texts = messages.map((one) => {
    const text = $$(".words", one).filter((words) => !words.closest("details"));
    return `${one.getAttribute("aria-label")}. ${text.map((words) => words.textContent).join(" ")}`;
  });
  $("#announced").textContent = texts.join(" ").slice(0, MAX_ANNOUNCED);
}

// Merges changes into the page: new messages at the end, new results into their calls.
function merge(made) {
  const added = [];
  const last = $$(".part", talk).at(-1);
  for (const one of [...made.children]) {
    const known = document.getElementById(one.id);
    if (known === null) {
      last.append(one);
      if (one.matches("article")) added.push(one);
      // The stored message replaces the streamed text.
      if (one.matches("article.assistant")) $("#writing").replaceChildren();
    } else {
      if (sources.get(known) === sources.get(one)) continue;
      keepReaderState(known, one);
      const focused = known.contains(document.activeElement);
      known.replaceWith(one);
      if (focused) one.focus({ preventScroll: true });
    }
  }
  if (added.length) announce(added);
  if (made.dataset.last !== "0") last.dataset.last = made.dataset.last;
  last.dataset.end = made.dataset.end;
  $("#message-count").textContent = made.dataset.messages;
  return added.length;
}

// Shows the session's state. The end of a turn sends no event, so the page polls during a turn.
let stateTimer;
function showState({ state, tokens, title }) {
  clearTimeout(stateTimer);
  // Poll again if the state is unknown, because the catalog is not ready, or if it may change soon:
  // a new message looks interrupted until a process starts its turn.
  if (state === undefined || state === "running" || state !== $("#state")?.title) {
    stateTimer = setTimeout(() => { if (!document.hidden) refresh(); }, 1500);
  }
  if (state === undefined) return;
  // A page rendered before the catalog was ready has no elements for state and tokens yet.
  if (!$("#state")) {
    $(".titleline").prepend(newElement("i", "state"));
    $("#state").setAttribute("role", "img");
  }
  if (!$("#tokens")) $("#message-count").after(newElement("span", "tokens"));
  $("#state").className = `dot ${state}`;
  $("#state").title = state;
  $("#state").setAttribute("aria-label", state);
  $("#tokens").textContent = tokens;
  $("#title").textContent = title;
  document.title = `${title} · stenolog`;
}

function newElement(tag, id) {
  const made = document.createElement(tag);
  made.id = id;
  return made;
}

let unseen = 0;
function showNewCount(count) {
  unseen = count;
  const button = $("#new");
  button.hidden = unseen === 0;
  button.textContent = `${unseen} new ↓`;
}

let refreshing = false;
let again = false;
async function refresh() {
  // A page that does not show the end is not kept up to date.
  if (isDeleted() || isOld()) return;
  if (refreshing) { again = true; return; }
  refreshing = true;
  try {
    await loadChanges();
  } finally {
    refreshing = false;
  }
  if (again) { again = false; await refresh(); }
}

async function loadChanges() {
  const stay = !atEnd();
  const height = document.documentElement.scrollHeight;
  const end = $$(".part", talk).at(-1);
  const digests = $$(".part", talk).map((one) => one.dataset.digest);
  // Load from the last prompt on. Of earlier messages only the visibility can change, which changes
  // the digest.
  const prompt = articles().filter((one) => one.matches(".user:not(.hidden-one)")).at(-1);
  const last = Number(end.dataset.last);
  const from = prompt ? prompt.dataset.seq - 1 : 0;
  // In a very long turn, load only new messages.
  const made = await tryOrToast(() => {
    return loadPart({ after: last - from > 300 ? last : from }).catch(endIfDeleted);
  });
  if (made === undefined) return;
  // A jump has loaded other messages meanwhile.
  if (end !== $$(".part", talk).at(-1)) { again = true; return; }
  showState(made.dataset);
  const summarized = made.dataset.summarized - end.dataset.summarized;
  if (summarized > 0) {
    const messages = summarized === 1 ? "1 message was" : `${summarized.toLocaleString("en")} messages were`;
    toast(`${messages} replaced by a summary. The model gets the summary instead.`);
  }
  let count;
  if (digests.every((one) => one === made.dataset.digest)) {
    count = merge(made);
  } else {
    await reload();
    count = articles().filter((one) => Number(one.dataset.seq) > last).length;
  }
  if (stay) showNewCount(unseen + count);
  else showNewCount(0);
  if (!stay && document.documentElement.scrollHeight !== height) toEnd();
}

// Loads the conversation again and keeps the scroll position.
async function reload({ end = false } = {}) {
  const live = end || !isOld();
  const before = $$(".part", talk).at(-1);
  const read = end || (live && atEnd()) ? undefined : messageBeingRead();
  const fields = messageFields();
  if (read) fields.at = read.dataset.seq;
  const made = await tryOrToast(() => html(`${path}${ofAgent(fields)}`));
  if (made === undefined) return;
  const parts = $$("#talk .part", made);
  // If the page showed the end, load up to the end.
  while (live && parts.at(-1).dataset.newer === "true") {
    const more = await tryOrToast(() => loadPart({ after: parts.at(-1).dataset.last }));
    if (more === undefined) return;
    parts.push(more);
  }
  // A jump has loaded other messages meanwhile.
  if (before !== $$(".part", talk).at(-1)) { await reload({ end }); return; }
  const top = read?.getBoundingClientRect().top;
  for (const one of parts.flatMap((each) => $$("article", each))) {
    const known = document.getElementById(one.id);
    if (known) keepReaderState(known, one);
  }
  const focused = document.activeElement.closest("#talk article")?.id;
  talk.replaceChildren(...parts);
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  for (const id of ["message-count", "tokens", "damage"]) {
    const now = $(`#${id}`, made);
    if (now) $(`#${id}`)?.replaceWith(now);
  }
  $("#older")?.remove();
  $("#newer")?.remove();
  addOlderButton();
  addNewerButton();
  const seq = Number(read?.dataset.seq);
  const now = articles().find((one) => Number(one.dataset.seq) >= seq);
  if (now) scrollBy(0, now.getBoundingClientRect().top - top);
}

// Returns how many pixels the sticky headers cover at the top of the window.
function coveredHeight() {
  const sticky = $$(".top, #session-bar").filter((one) => getComputedStyle(one).position === "sticky");
  return Math.max(0, ...sticky.map((one) => one.getBoundingClientRect().bottom));
}

// Returns the first message in the window that the sticky headers do not cover.
function messageBeingRead() {
  const under = coveredHeight();
  return articles().find((one) => one.getBoundingClientRect().bottom > under);
}

let source = null;
let followed = false;
function follow() {
  followed = true;
  if (source || document.hidden) return;
  const { last } = $$(".part", talk).at(-1).dataset;
  source = new EventSource(`${base}/events${ofAgent({ after: last, changes: "true" })}`);
  // Changes made before the connection was open cause no event, so they are loaded now.
  source.addEventListener("open", () => refresh());
  source.addEventListener("open", () => setConnected(true));
  source.addEventListener("error", reconnect);
  source.addEventListener("message", () => refresh());
  source.addEventListener("change", () => refresh());
  source.addEventListener("deleted", endPage);
}

const isDeleted = () => $("#deleted")?.hidden === false;
// Disables all actions of a deleted session, but keeps the content of the page.
function endPage() {
  $("#deleted").hidden = false;
  $("#state")?.remove();
  for (const one of $$("#say *, #rename, #retag, [data-undo], [data-fork-at]")) one.disabled = true;
  followed = false;
  disconnect();
  setConnected(true);
}

function endIfDeleted(error) {
  if (error.status !== 404 && error.status !== 410) throw error;
  endPage();
}

// Browsers reconnect by themselves, but not after every kind of failure.
function reconnect() {
  setConnected(false);
  if (source?.readyState !== EventSource.CLOSED) return;
  disconnect();
  setTimeout(() => { if (followed) follow(); }, 3000);
}

function disconnect() {
  source?.close();
  source = null;
}

// Browsers limit connections across all tabs, so hidden tabs close their connection.
document.addEventListener("visibilitychange", async () => {
  if (!followed) return;
  if (document.hidden) { disconnect(); return; }
  await refresh();
  follow();
});
addEventListener("pagehide", disconnect);

const isOld = () => $$(".part", talk).at(-1).dataset.newer === "true";

// Called after another script has replaced, added or removed parts.
function partsChanged() {
  for (const button of $$("#older, #newer")) button.remove();
  addOlderButton();
  addNewerButton();
  if (!isOld()) { follow(); return; }
  followed = false;
  disconnect();
}

if (talk) {
  addOlderButton();
  addNewerButton();
  talk.addEventListener("parts", partsChanged);
  const target = location.hash.startsWith("#m") && document.getElementById(location.hash.slice(1));
  if (target) target.scrollIntoView({ block: "center" });
  else if (talk.dataset.at === "0") toEnd();
  if (!isOld()) follow();
  // The state in the page may be older than its messages.
  if ($("#state.running") || (!isOld() && !$("#state.idle"))) refresh();
  $("#new").addEventListener("click", async () => {
    showNewCount(0);
    if (isOld()) { await reload({ end: true }); follow(); }
    toEnd();
  });
  addEventListener("scroll", () => { if (unseen && atEnd()) showNewCount(0); }, { passive: true });
  addEventListener("hashchange", () => {
    const seq = /^#m(\d+)$/.exec(location.hash)?.[1];
    if (seq && !document.getElementById(`m${seq}`)) {
      location.assign(`${path}${ofAgent({ at: seq })}#m${seq}`);
    }
  });
  talk.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.matches("[data-undo]")) {
      const what = $(".line", button.closest(".divider")).textContent.trim();
      const words = `${what}. Undo makes the messages visible to the model again. You cannot redo this.`;
      if (!await askToConfirm(words, "Undo")) return;
      const done = await tryOrToast(() => api("POST", `${base}/undo${ofAgent()}`));
      if (done === undefined) return;
      toast(undoNotice(done));
      await reload();
    } else if (button.matches("[data-fork-at]")) {
      const at = Number(button.dataset.forkAt);
      const new_key = talk.dataset.fork;
      const done = await tryOrToast(() => api("POST", `${base}/fork${ofAgent()}`, { new_key, at }));
      if (!done) return;
      noticeOnNextPage(`Forked from ${key} at message ${at}.`);
      location.assign(`/s/${encodeURIComponent(done.key)}${ofAgent()}`);
    }
  });
}

// --- the export ---------------------------------------------------------------------------------

const menu = $("details.export");
if (menu) {
  document.addEventListener("click", (event) => {
    // Choosing an entry closes the menu too.
    if (!event.target.closest("details.export summary")) menu.open = false;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    const within = menu.contains(document.activeElement);
    menu.open = false;
    if (within) $("summary", menu).focus();
  });
  // Moving the focus out of the menu closes it.
  menu.addEventListener("focusout", (event) => {
    if (event.relatedTarget && !menu.contains(event.relatedTarget)) menu.open = false;
  });
}

// --- title and tags ---------------------------------------------------------------------------

if (session) {
  $("#rename")?.addEventListener("click", async () => {
    const title = await askForText("Title", $("#title").textContent);
    if (title === null) return;
    const done = await tryOrToast(() => api("PATCH", base + ofAgent(), { title: title.trim() || null }));
    if (done) $("#title").textContent = done.title || key;
  });
  $("#retag")?.addEventListener("click", async () => {
    const now = JSON.parse($("#tags").dataset.tags);
    const reply = await askForText("Tags (comma-separated)", now.join(", "));
    if (reply === null) return;
    const tags = reply.split(",").map((one) => one.trim()).filter(Boolean);
    const done = await tryOrToast(() => api("PATCH", base + ofAgent(), { tags }));
    if (!done) return;
    $("#tags").dataset.tags = JSON.stringify(done.tags);
    $("#tags").replaceChildren(...done.tags.map((tag) => {
      const link = document.createElement("a");
      link.className = "tag";
      link.href = `/${ofAgent({ tag })}`;
      link.textContent = tag;
      return link;
    }));
  });
}

// --- the chat box -----------------------------------------------------------------------------

const say = $("#say");

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(() => { throw new GatewayUnreachable(); });
    if (done) return;
    const pieces = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) {
      const lines = piece.split("\n").filter((line) => line.startsWith("data: "));
      const text = lines.map((line) => line.slice(6)).join("\n");
      if (text && text !== "[DONE]") yield JSON.parse(text);
    }
  }
}

async function sendMessage(words, session, model) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      model,
      stream: true,
      messages: [{ role: "user", content: words }],
      metadata: { session },
    }),
  });
  if (response.ok) return response;
  const reply = await response.json().catch(() => ({}));
  throw failure(reply.error?.message, response);
}

// Shows the answer as plain text while it is streamed, until the stored message replaces it.
async function stream(words) {
  const writing = $("#writing");
  const response = await sendMessage(words, key, agent);
  for await (const one of events(response)) {
    if (one.error) throw new Error(one.error.message);
    const piece = one.choices?.[0]?.delta?.content;
    if (!piece) continue;
    const stay = !atEnd();
    writing.hidden = false;
    writing.textContent += piece;
    if (!stay) toEnd();
  }
}

async function command(words) {
  const reply = await api("POST", `${base}/messages${ofAgent()}`, { content: words });
  if (reply.session !== key) {
    location.assign(`/s/${encodeURIComponent(reply.session)}${ofAgent()}`);
    return;
  }
  // A stored answer, as of /retry, is one of the messages that are loaded now.
  if (reply.seq !== null) { await reload(); return; }
  const writing = $("#writing");
  await reload();
  // Answers to commands are plain text, except that they quote names.
  writing.textContent = reply.answer.replaceAll("`", "");
  writing.hidden = false;
  writing.scrollIntoView({ block: "nearest" });
}

if (say) {
  const box = $("textarea", say);
  const fit = () => {
    box.rows = Math.min(8, Math.max(1, box.value.split("\n").length));
  };
  box.addEventListener("input", fit);
  box.addEventListener("keydown", sendsOnEnter(() => say.requestSubmit()));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") box.blur();
  });
  say.addEventListener("submit", async (event) => {
    event.preventDefault();
    const words = box.value.trim();
    if (!words) return;
    if (!$("#gone").hidden) {
      toast("Can't reach the gateway. Your message is kept.", true);
      return;
    }
    const writing = $("#writing");
    writing.textContent = "";
    writing.hidden = true;
    box.value = "";
    fit();
    sending = true;
    allowSend();
    $("#stop").hidden = false;
    if (isOld()) { await reload({ end: true }); follow(); }
    toEnd();
    const isCommand = /^\/[a-zA-Z_]+(\s|$)/.test(words);
    try {
      if (isCommand) {
        await command(words);
      } else {
        await stream(words);
        await refresh();
        writing.hidden = true;
        writing.textContent = "";
      }
    } catch (error) {
      const gone = error instanceof GatewayUnreachable;
      toast(gone ? "Can't reach the gateway. Your message is kept." : error.message, true);
      writing.hidden = true;
      box.value = box.value ? `${words}\n${box.value}` : words;
      fit();
      if (error.status === 410) endPage();
    }
    sending = false;
    allowSend();
    $("#stop").hidden = true;
  });
  $("#stop").addEventListener("click", () => tryOrToast(() => api("POST", `${base}/stop${ofAgent()}`)));
}

$("#begin")?.addEventListener("click", async ({ currentTarget: button }) => {
  const words = await askForText("New conversation", "", { long: true, does: "Send", enter: true });
  if (!words?.trim()) return;
  const named = found.dataset.agent;
  // Once an answer has started, the gateway completes it even if the reader leaves this page.
  const begun = await tryOrToast(() => sendMessage(words, button.dataset.key, named));
  if (!begun) return;
  const suffix = named === "main" ? "" : `?agent=${encodeURIComponent(named)}`;
  location.assign(`/s/${encodeURIComponent(button.dataset.key)}${suffix}`);
});

// --- no gateway -------------------------------------------------------------------------------

// While the gateway does not answer, a click on a link does not replace this page by the browser's
// error page.
document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[href]");
  if ($("#gone").hidden || !link || link.origin !== location.origin) return;
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.defaultPrevented) return;
  if (link.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  await tryOrToast(async () => {
    await request(link.href, { method: "HEAD" });
    location.assign(link.href);
  });
});

// --- keys -------------------------------------------------------------------------------------

function currentRow() {
  return $("[data-row].chosen");
}

// Marks the current row. Of all messages, the Tab key reaches only the current one.
function markRow(row) {
  const before = currentRow();
  before?.classList.remove("chosen");
  before?.removeAttribute("aria-current");
  if (before?.matches("article")) before.tabIndex = -1;
  row.classList.add("chosen");
  row.setAttribute("aria-current", "true");
  if (row.matches("article")) row.tabIndex = 0;
}

function focusRow(row) {
  if (!row) return;
  markRow(row);
  row.scrollIntoView({ block: "nearest" });
  const target = row.matches("article") ? row : $("a, summary", row) ?? row;
  target.focus({ preventScroll: true });
}

// A row becomes the current row when the Tab key moves the focus into it.
document.addEventListener("focusin", ({ target }) => {
  const row = target.closest("[data-row]");
  if (row && row !== target && row !== currentRow() && target.matches(":focus-visible")) markRow(row);
});

const FOLDED = "details.tool, details.thought";
const FOLDED_IN_MESSAGE = `${FOLDED}, details.folded`;

// Opens these details, or closes them if all are open. Returns false if there are no details.
function toggleDetails(details) {
  const open = details.some((one) => !one.open);
  details.forEach((one) => { one.open = open; });
  return details.length > 0;
}

function moveRow(rows, by) {
  if (!rows.length) return;
  const now = currentRow();
  const all = $$("[data-row]");
  const place = now ? all.indexOf(now) : -1;
  if (!now) {
    // Start at the first visible row.
    const under = coveredHeight();
    const top = rows.find((row) => row.getBoundingClientRect().bottom > under + 20);
    focusRow(by > 0 ? top : rows.at(-1));
    return;
  }
  const next = by > 0
    ? rows.find((row) => all.indexOf(row) > place)
    : rows.findLast((row) => all.indexOf(row) < place);
  focusRow(next);
}

const KEYS = {
  "/": () => { $("#search").focus(); $("#search").select(); },
  j: () => moveRow($$("[data-row]"), 1),
  k: () => moveRow($$("[data-row]"), -1),
  g: () => {
    if ($("#older")) { location.assign(path + ofAgent({ ...messageFields(), at: 1 })); return; }
    scrollTo(0, 0);
    focusRow($$("[data-row]")[0]);
  },
  G: () => {
    if ($("#newer")) { location.assign(path + ofAgent(messageFields())); return; }
    toEnd();
    focusRow($$("[data-row]").at(-1));
  },
  "]": () => moveRow($$("article.user"), 1),
  "[": () => moveRow($$("article.user"), -1),
  e: () => toggleDetails($$(FOLDED)),
  c: () => say && $("textarea", say).focus(),
  u: () => location.assign(`/${ofAgent()}`),
  "?": () => help.showModal(),
  Enter: () => {
    if (currentRow()?.matches("article")) toggleDetails($$(FOLDED_IN_MESSAGE, currentRow()));
    else $("li.chosen a")?.click();
  },
};

document.addEventListener("keydown", (event) => {
  const isSearch = event.key === "k" && (event.ctrlKey || event.metaKey) && !event.altKey;
  if (isSearch && $("#search") && !$("dialog[open]")) {
    event.preventDefault();
    KEYS["/"]();
    return;
  }
  // A dialog that was just closed keeps the focus for a moment.
  const at = event.target.closest("dialog:not([open])") ? document.body : event.target;
  if (at.closest("input, textarea, select, [contenteditable]")) {
    if (event.key === "Escape") at.blur();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
  if (event.key === "Enter" && at.closest("a, button, summary")) return;
  if (event.key === " ") {
    // In a message without tools and thinking, the key scrolls as usual.
    if (at.matches("article") && toggleDetails($$(FOLDED_IN_MESSAGE, at))) event.preventDefault();
    return;
  }
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
