// Navigation in a session: the sticky bar, the outline of prompts, search, filters, and
// loading while scrolling. viewer.js loads older, newer and live messages.

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

// --- the sticky bar ---------------------------------------------------------------------------

const root = document.documentElement;
const bar = $("#session-bar");
const top_ = $(".top");
const isSticky = (one) => getComputedStyle(one).position === "sticky";
const topHeight = () => (isSticky(top_) ? top_.offsetHeight : 0);
const coveredHeight = () => Math.max(topHeight(), bar.getBoundingClientRect().bottom);

function measure() {
  root.style.setProperty("--top-height", `${topHeight()}px`);
  bar.classList.toggle("stuck", bar.getBoundingClientRect().top <= topHeight() + 1 && scrollY > 1);
}
new ResizeObserver(measure).observe(top_);
addEventListener("resize", measure);
addEventListener("scroll", measure, { passive: true });
measure();

// Jumps must not scroll a message under the bar, which is higher while the tools are open.
new ResizeObserver(() => {
  root.style.scrollPaddingTop = `${topHeight() + bar.offsetHeight + 10}px`;
}).observe(bar);

new MutationObserver(() => { $("#short-title").textContent = $("#title").textContent; })
  .observe($("#title"), { childList: true, characterData: true, subtree: true });

// --- messages on the page ---------------------------------------------------------------------

const talk = $("#talk");
const { agent, path } = $("#session").dataset;
const MAX_ARTICLES = 400;

function address(rest, fields) {
  const named = new URLSearchParams(fields);
  if (agent !== "main") named.set("agent", agent);
  const text = named.toString();
  return `${path}${rest}${text ? `?${text}` : ""}`;
}

async function html(url) {
  const response = await fetch(url, { headers: { Accept: "text/html" } });
  if (!response.ok) throw new Error(response.statusText);
  return new DOMParser().parseFromString(await response.text(), "text/html");
}

function showNotice(text) {
  document.dispatchEvent(new CustomEvent("notice", { detail: { text } }));
}

const tryOrNotice = async (act) => {
  try {
    return await act();
  } catch (error) {
    showNotice(error instanceof TypeError ? "Can't reach the gateway." : error.message);
    return undefined;
  }
};

const parts = () => $$(".part", talk);
const articles = () => $$("article.message", talk);
const seqOf = (one) => Number(one.dataset.seq);
const atEnd = () => innerHeight + scrollY >= root.scrollHeight - 120;
const showsEnd = () => parts().at(-1).dataset.newer !== "true";

// Returns the first index of a sorted list where `test` is true.
function firstIndexWhere(list, test) {
  let [low, high] = [0, list.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (test(list[middle])) high = middle;
    else low = middle + 1;
  }
  return low;
}

const firstBelow = (list, line) => firstIndexWhere(list, (one) => one.getBoundingClientRect().bottom > line);

// Runs a change of the page without moving the message that is being read.
function keepScrollPosition(change) {
  const list = articles();
  const read = list[firstBelow(list, coveredHeight())];
  const before = read?.getBoundingClientRect().top;
  change();
  if (read?.isConnected) scrollBy(0, read.getBoundingClientRect().top - before);
}

// Removes parts that are far from the window, so that the page stays small.
function removeFarParts() {
  const list = parts();
  let count = articles().length;
  const sizes = new Map(list.map((one) => [one, $$("article", one).length]));
  let changed = false;
  while (count > MAX_ARTICLES && list.length > 1) {
    const [first, last] = [list[0], list.at(-1)];
    const above = -first.getBoundingClientRect().bottom;
    const below = last.getBoundingClientRect().top - innerHeight;
    if (Math.max(above, below) < innerHeight) break;
    const gone = above > below ? list.shift() : list.pop();
    if (gone === first) list[0].dataset.older = "true";
    else list.at(-1).dataset.newer = "true";
    keepScrollPosition(() => gone.remove());
    count -= sizes.get(gone);
    changed = true;
  }
  if (changed) talk.dispatchEvent(new Event("parts"));
}

// Number of the latest jump or load: responses to earlier requests are discarded.
let latest = 0;
// Filter of the messages on the page. `talk.dataset.filter` is the one that the reader selected.
let shownFilter = talk?.dataset.filter;

// Replaces the messages on the page by those around a seq, or by the newest messages.
async function loadAround(at) {
  const number = ++latest;
  const { filter } = talk.dataset;
  const fields = Object.fromEntries(new URLSearchParams(filter));
  const made = await tryOrNotice(() => html(address("", at ? { ...fields, at } : fields)));
  const next = made && $("#talk", made);
  if (!next || number !== latest) return false;
  shownFilter = filter;
  talk.dataset.full = next.dataset.full;
  talk.replaceChildren(...next.children);
  talk.dispatchEvent(new Event("parts"));
  return true;
}

// Returns the message with this seq. For a tool result, returns the message that shows it.
function articleOf(seq) {
  const list = articles();
  const exact = document.getElementById(`m${seq}`);
  if (exact) return exact;
  const place = firstIndexWhere(list, (one) => seqOf(one) > seq);
  const within = parts().some((one) => Number(one.dataset.first) <= seq && seq <= Number(one.dataset.last));
  return within ? list[Math.max(0, place - 1)] : undefined;
}

async function jump(seq, { focus = false } = {}) {
  if (articleOf(seq) && shownFilter === talk.dataset.filter) latest += 1;
  else if (!(await loadAround(seq))) return undefined;
  const found = articleOf(seq) ?? articles().at(0);
  if (!found) return undefined;
  for (const one of $$(".arrived", talk)) one.classList.remove("arrived");
  found.classList.add("arrived");
  arrived = found;
  found.scrollIntoView({ block: "start" });
  showPositionSoon();
  if (focus) {
    found.tabIndex = -1;
    found.focus({ preventScroll: true });
  }
  const kept = Object.fromEntries(new URLSearchParams(talk.dataset.filter));
  history.replaceState(null, "", `${address("", { ...kept, at: seq })}#m${seq}`);
  return found;
}

// --- loading while scrolling, and the position ------------------------------------------------

const numbers = new Intl.NumberFormat("en");
let current = 0;
// Message of the last jump, until the reader scrolls. It counts as the message being read, even if
// it is too near to the end of the page to be scrolled to the top.
let arrived;

// Returns the present element of a message: a live change may have replaced the element.
function currentElement(one) {
  return one && (document.getElementById(one.id) ?? undefined);
}

function showPosition() {
  const list = articles();
  $("#nothing").hidden = list.length > 0 || !talk.dataset.filter;
  if (!list.length) { $("#position").textContent = ""; return; }
  const under = coveredHeight();
  const first = list[Math.min(firstBelow(list, under), list.length - 1)];
  const beyond = firstIndexWhere(list, (one) => one.getBoundingClientRect().top > innerHeight - 60);
  const last = list[Math.max(list.indexOf(first), beyond - 1)];
  const end = Math.max(...parts().map((one) => Number(one.dataset.end)));
  const [from, to, all] = [seqOf(first), atEnd() && showsEnd() ? end : seqOf(last), end]
    .map((one) => numbers.format(one));
  $("#position").textContent = `${from}–${to} of ${all}`;
  // The message being read is the last one that starts in or above the upper fifth of the window.
  const line = under + (innerHeight - under) * 0.2;
  const read = list[Math.max(0, firstIndexWhere(list, (one) => one.getBoundingClientRect().top > line) - 1)];
  const now = currentElement(arrived) ?? (atEnd() && showsEnd() ? list.at(-1) : read);
  if (seqOf(now) !== current) { current = seqOf(now); showCurrent(); }
}

let waiting = false;
function showPositionSoon() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; showPosition(); });
}

function startScrolling() {
  const seen = new IntersectionObserver((entries) => {
    for (const one of entries) if (one.isIntersecting) one.target.click();
  }, { rootMargin: "900px 0px" });
  const watch = () => $$("#older, #newer").forEach((one) => seen.observe(one));
  new MutationObserver(watch).observe(talk.parentElement, { childList: true });
  new MutationObserver(() => { removeFarParts(); showPositionSoon(); highlightMatches(); loadOutlineLater(); })
    .observe(talk, { childList: true, subtree: true });
  addEventListener("scroll", showPositionSoon, { passive: true });
  addEventListener("resize", showPositionSoon);
  for (const name of ["wheel", "touchmove", "keydown", "pointerdown"]) {
    addEventListener(name, () => { arrived = undefined; }, { passive: true, capture: true });
  }
  watch();
  showPositionSoon();
}

// --- the outline ------------------------------------------------------------------------------

const outline = $("#outline");
const turns = $("#outline-turns");
const MAX_LISTS = 6;
const isWide = matchMedia("(min-width: 1200px)");
const outlineShown = () => isWide.matches || document.body.classList.contains("outline-open");
const lists = () => $$(".turn-list", turns);
const links = () => $$("a[data-seq]", turns);
const startOf = (list) => Number(list.dataset.start);
const endOf = (list) => startOf(list) + list.children.length;

let loadingOutline = false;
async function outlinePart(fields) {
  if (loadingOutline) return undefined;
  loadingOutline = true;
  try {
    const made = await html(address("/outline", fields));
    const list = $(".turn-list", made);
    if (list) $("#outline-totals").textContent = list.dataset.totals;
    return list ?? undefined;
  } catch {
    return undefined;
  } finally {
    loadingOutline = false;
  }
}

// Shows the prompts around the message being read.
async function loadOutline() {
  if (!talk || !outlineShown() || loadingOutline) return;
  const list = await outlinePart(current ? { at: current } : {});
  if (!list) return;
  const from = turns.scrollTop;
  const same = lists().length === 1 && lists()[0].dataset.start === list.dataset.start;
  turns.replaceChildren(list);
  if (same) turns.scrollTop = from;
  showCurrent();
  watchOutline();
}

let later;
function loadOutlineLater() {
  const last = lists().at(-1);
  const prompt = $$("article.user", talk).at(-1);
  const known = last && endOf(last) < Number(last.dataset.count);
  if (!last || known || !prompt || seqOf(prompt) <= seqOf(links().at(-1) ?? { dataset: { seq: 0 } })) return;
  clearTimeout(later);
  later = setTimeout(loadOutline, 300);
}

function showCurrent() {
  const all = links();
  if (!all.length || !current) return;
  const place = firstIndexWhere(all, (one) => seqOf(one) > current) - 1;
  const [first, last] = [lists()[0], lists().at(-1)];
  const outside = (place < 0 && startOf(first) > 0)
    || (place === all.length - 1 && endOf(last) < Number(last.dataset.count));
  if (outside) { loadOutline(); return; }
  const now = all[Math.max(0, place)];
  const before = $("[aria-current]", turns);
  if (before === now) return;
  before?.removeAttribute("aria-current");
  now.setAttribute("aria-current", "true");
  // Only the outline scrolls, not the page.
  const [box, row] = [turns.getBoundingClientRect(), now.getBoundingClientRect()];
  if (turns.matches(":hover") && before) return;
  if (row.top < box.top + 40 || row.bottom > box.bottom - 40) {
    turns.scrollTop += row.top - box.top - box.height / 2;
  }
}

// Loads the part of the outline before its first or after its last prompt.
async function extendOutline(up) {
  const edge = up ? lists()[0] : lists().at(-1);
  if (!edge) return;
  const start = up ? Math.max(0, startOf(edge) - 100) : endOf(edge);
  if (up ? startOf(edge) === 0 : start >= Number(edge.dataset.count)) return;
  const list = await outlinePart({ start });
  if (!list || !edge.isConnected) return;
  // Do not show prompts twice: the first part may overlap with the next part.
  if (up) for (const one of [...list.children].slice(startOf(edge) - start)) one.remove();
  const before = edge.getBoundingClientRect().top;
  if (up) turns.prepend(list);
  else turns.append(list);
  const all = lists();
  if (all.length > MAX_LISTS) (up ? all.at(-1) : all[0]).remove();
  turns.scrollTop += edge.getBoundingClientRect().top - before;
  watchOutline();
}

const outlineEnds = new IntersectionObserver((entries) => {
  for (const one of entries) {
    if (one.isIntersecting) extendOutline(one.target === lists()[0]?.firstElementChild);
  }
}, { root: turns, rootMargin: "300px 0px" });

function watchOutline() {
  outlineEnds.disconnect();
  const [first, last] = [lists()[0]?.firstElementChild, lists().at(-1)?.lastElementChild];
  if (first) outlineEnds.observe(first);
  if (last && last !== first) outlineEnds.observe(last);
}

function openOutline(open) {
  document.body.classList.toggle("outline-open", open);
  $("#outline-button").setAttribute("aria-expanded", String(open));
}

async function focusOutline() {
  if (!isWide.matches) openOutline(true);
  if (!lists().length) await loadOutline();
  else showCurrent();
  ($("[aria-current]", turns) ?? links()[0] ?? outline).focus({ preventScroll: true });
}

function closeOutline() {
  if (!document.body.classList.contains("outline-open")) return;
  openOutline(false);
  $("#outline-button").focus();
}

function startOutline() {
  $("#outline-button").addEventListener("click", focusOutline);
  turns.addEventListener("click", async (event) => {
    const link = event.target.closest("a[data-seq]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const drawer = !isWide.matches;
    if (drawer) openOutline(false);
    await jump(seqOf(link), { focus: drawer });
  });
  outline.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" && isWide.matches) document.activeElement.blur();
    if (!step) return;
    event.preventDefault();
    const all = links();
    all[all.indexOf(document.activeElement) + step]?.focus();
  });
  document.addEventListener("click", (event) => {
    if (document.body.classList.contains("outline-open")
      && !event.target.closest("#outline, #outline-button")) openOutline(false);
  });
  isWide.addEventListener("change", () => { openOutline(false); loadOutline(); });
  // Wait for the first paint, because reading a long session takes a second.
  if (document.readyState === "complete") setTimeout(loadOutline);
  else addEventListener("load", () => setTimeout(loadOutline));
}

// --- search in the session --------------------------------------------------------------------

const search = { words: [], seqs: [], place: -1, complete: true, number: 0 };

function showMatchCount() {
  const { seqs, place, complete, words } = search;
  const all = `${numbers.format(seqs.length)}${complete ? "" : "+"}`;
  if (!words.length) $("#find-count").textContent = "";
  else if (!seqs.length) $("#find-count").textContent = "no match";
  else $("#find-count").textContent = `${numbers.format(place + 1)} of ${all}`;
}

// Returns the ranges of the search words in a message, at most `most` ranges.
function rangesIn(article, most) {
  const made = [];
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node && made.length < most; node = walker.nextNode()) {
    if (node.parentElement.closest("header")) continue;
    const text = node.data.toLowerCase();
    if (text.length !== node.data.length) continue;
    for (const word of search.words) {
      for (let at = text.indexOf(word); at >= 0 && made.length < most; at = text.indexOf(word, at + word.length)) {
        const range = new Range();
        range.setStart(node, at);
        range.setEnd(node, at + word.length);
        made.push(range);
      }
    }
  }
  return made;
}

let currentMatch;
function highlightMatches() {
  if (!globalThis.CSS?.highlights) return;
  CSS.highlights.delete("found");
  CSS.highlights.delete("found-here");
  if (!search.words.length) return;
  const found = currentElement(currentMatch);
  const others = articles().filter((one) => one !== found).flatMap((one) => rangesIn(one, 20));
  CSS.highlights.set("found", new Highlight(...others.slice(0, 2000)));
  if (found) CSS.highlights.set("found-here", new Highlight(...rangesIn(found, 200)));
}

async function showMatch(place) {
  const { seqs } = search;
  search.place = (place + seqs.length) % seqs.length;
  showMatchCount();
  const seq = seqs[search.place];
  let found = await jump(seq);
  if (found && talk.dataset.filter && !rangesIn(found, 1).length) {
    showNotice("The filter was removed to show this message.");
    await setFilter("", { at: seq });
    found = await jump(seq);
  }
  if (!found) return;
  currentMatch = found;
  const [first] = rangesIn(found, 1);
  for (let one = first?.startContainer.parentElement.closest("details"); one; one = one.parentElement.closest("details")) {
    one.open = true;
  }
  highlightMatches();
  const box = first?.getBoundingClientRect();
  if (box && (box.top < coveredHeight() || box.bottom > innerHeight - 100)) {
    scrollBy(0, box.top - innerHeight / 2);
  }
}

async function find(words, { from } = {}) {
  const number = ++search.number;
  if (!words.trim()) {
    Object.assign(search, { words: [], seqs: [], place: -1, text: "" });
    currentMatch = undefined;
    showMatchCount();
    highlightMatches();
    return;
  }
  $("#find-count").textContent = "…";
  const answered = await tryOrNotice(async () => {
    const response = await fetch(address("/find", { q: words }));
    if (!response.ok) throw new Error(response.statusText);
    return response.json();
  });
  if (number !== search.number || !answered) return;
  Object.assign(search, answered, { place: -1, text: words });
  showMatchCount();
  if (!search.seqs.length) { highlightMatches(); return; }
  // Start at the first match from `from` on, otherwise at the first match of all.
  const place = from ? search.seqs.findIndex((seq) => seq >= from) : 0;
  await showMatch(Math.max(0, place));
}

function openTools(open) {
  $("#tools").hidden = !open;
  $("#tools-button").setAttribute("aria-expanded", String(open));
}

function startSearch() {
  const input = $("#find-words");
  const step = (by) => {
    if (search.text === input.value && search.seqs.length) showMatch(search.place + by);
    else find(input.value);
  };
  $("#tools-button").addEventListener("click", () => {
    openTools($("#tools").hidden);
    if (!$("#tools").hidden) input.focus();
  });
  let pause;
  input.addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(() => find(input.value), 250);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) {
      event.preventDefault();
      clearTimeout(pause);
      step(event.shiftKey ? -1 : 1);
    } else if (event.key === "Escape") {
      clearTimeout(pause);
      input.value = "";
      find("");
      openTools(Boolean(talk.dataset.filter));
    }
  });
  $("#find").addEventListener("submit", (event) => event.preventDefault());
  $("#find-next").addEventListener("click", () => step(1));
  $("#find-previous").addEventListener("click", () => step(-1));
  if (talk.dataset.q) {
    openTools(true);
    input.value = talk.dataset.q;
    find(input.value, { from: Number(talk.dataset.at) });
  }
}

// --- filters ----------------------------------------------------------------------------------

const filterKey = `filter:${path}`;
const buttons = () => $$("#filters button");

function showFilter() {
  const chosen = new URLSearchParams(talk.dataset.filter);
  for (const one of buttons()) {
    const [name, value] = one.dataset.filter.split("=");
    const on = chosen.get(name) === value;
    one.setAttribute("aria-pressed", String(on !== one.hasAttribute("data-inverted")));
  }
}

async function setFilter(text, { at = current } = {}) {
  const list = articles();
  const read = list[firstBelow(list, coveredHeight())];
  const place = read?.getBoundingClientRect().top;
  const stay = atEnd() && showsEnd();
  talk.dataset.filter = text;
  showFilter();
  try { sessionStorage.setItem(filterKey, text); } catch { /* without storage the filter is kept only for this page */ }
  const seq = read ? seqOf(read) : at;
  if (!(await loadAround(stay ? 0 : seq))) return;
  history.replaceState(null, "", address("", Object.fromEntries(new URLSearchParams(text))));
  if (stay) { scrollTo(0, root.scrollHeight); showPositionSoon(); return; }
  const all = articles();
  const now = all[Math.min(firstIndexWhere(all, (one) => seqOf(one) >= seq), all.length - 1)];
  if (now) scrollBy(0, now.getBoundingClientRect().top - place);
  showPositionSoon();
}

function startFilters() {
  showFilter();
  $("#filters").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const [name, value] = button.dataset.filter.split("=");
    const chosen = new URLSearchParams(talk.dataset.filter);
    if (chosen.get(name) === value) chosen.delete(name);
    else chosen.set(name, value);
    setFilter(chosen.toString());
  });
  let kept = null;
  try { kept = sessionStorage.getItem(filterKey); } catch { /* this browser has no storage */ }
  if (talk.dataset.filter || kept) openTools(true);
  if (!talk.dataset.filter && kept && !location.search.includes("at=")) setFilter(kept);
}

// --- hidden messages at a divider -------------------------------------------------------------

async function showHidden(button, divider) {
  const { first, last } = divider.dataset;
  const fields = { first, last: divider.left ?? last };
  button.disabled = true;
  const made = await tryOrNotice(() => html(address("/fragment", fields)));
  button.disabled = false;
  const shown = made && $(".part", made);
  if (!shown) return;
  const hidden = document.createElement("div");
  hidden.className = "revealed";
  hidden.append(...$$("article", shown));
  // Long ranges are loaded in pieces, the last piece first. The divider does not move.
  const before = divider.getBoundingClientRect().top;
  (divider.revealed?.at(-1) ?? divider).before(hidden);
  divider.revealed = [...(divider.revealed ?? []), hidden];
  scrollBy(0, divider.getBoundingClientRect().top - before);
  divider.left = Number(shown.dataset.first) - 1;
  button.dataset.label ??= button.textContent;
  button.textContent = "Show more";
  button.hidden = divider.left < Number(first);
  if ($("[data-hide-hidden]", divider)) return;
  const hide = document.createElement("button");
  hide.className = "small";
  hide.textContent = "Hide messages";
  hide.setAttribute("data-hide-hidden", "");
  button.after(hide);
  if (button.hidden) hide.focus({ preventScroll: true });
}

function hideAgain(button, divider) {
  const before = divider.getBoundingClientRect().top;
  for (const one of divider.revealed) one.remove();
  divider.revealed = undefined;
  divider.left = undefined;
  scrollBy(0, divider.getBoundingClientRect().top - before);
  const show = $("[data-show-hidden]", divider);
  show.hidden = false;
  show.textContent = show.dataset.label;
  show.focus({ preventScroll: true });
  button.remove();
}

function startDividers() {
  talk.addEventListener("click", (event) => {
    const button = event.target.closest("[data-show-hidden], [data-hide-hidden]");
    const divider = button?.closest(".divider");
    if (!divider) return;
    if (button.matches("[data-show-hidden]")) showHidden(button, divider);
    else hideAgain(button, divider);
  });
}

// --- keys -------------------------------------------------------------------------------------

function startKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") closeOutline();
    if (event.target.closest("input, textarea, select, [contenteditable]")) return;
    if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
    if (event.key === "f") {
      event.preventDefault();
      openTools(true);
      $("#find-words").focus();
      $("#find-words").select();
    } else if (event.key === "o") {
      event.preventDefault();
      focusOutline();
    }
  });
}

if (talk) {
  startDividers();
  startOutline();
  startFilters();
  startSearch();
  startKeys();
  startScrolling();
}
