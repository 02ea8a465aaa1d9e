// Script of the list of sessions: short addresses, position after the back button, delete, archive
// and restore. viewer.js loads rows and search results.

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

const found = $("#found");
const rows = () => $$(".row", found);
const search = $("#search");

// --- addresses ---------------------------------------------------------------------------------

const address = (fields) => (String(fields) ? `/?${fields}` : "/");

// Empty fields of a form are left out of its address.
document.addEventListener("formdata", ({ formData }) => {
  for (const [name, value] of [...formData]) if (!value) formData.delete(name);
});

$("#sort")?.addEventListener("change", ({ target }) => target.form.requestSubmit());
for (const form of $$(".order, .dates")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const fields = new URLSearchParams(new FormData(form));
    if (search.value) fields.set("q", search.value);
    location.assign(address(fields));
  });
}

// A click on a filter keeps the search words, which may be newer than the address of the link.
document.addEventListener("click", (event) => {
  const link = event.target.closest("#facets a, .chosen-filters a");
  if (!link || !search || !found) return;
  const fields = new URL(link.href).searchParams;
  if (search.value) fields.set("q", search.value);
  else fields.delete("q");
  link.href = address(fields);
});

const filters = $("#show-facets");
filters?.addEventListener("click", () => {
  const open = $("#facets").classList.toggle("open");
  filters.setAttribute("aria-expanded", String(open));
});

// --- position after the back button ------------------------------------------------------------

// Each entry of the browser's history stores the number of loaded rows and the scroll position.
const MAX_ROWS = 1000;

function savePosition() {
  history.replaceState({ ...history.state, rows: rows().length, y: scrollY }, "");
}

async function restorePosition({ rows: wanted, y }) {
  history.scrollRestoration = "manual";
  while (rows().length < wanted) {
    const before = rows().length;
    const more = $(".sessions [data-more]", found);
    if (!more) break;
    const changed = new Promise((go) => {
      const seen = new MutationObserver(() => {
        if (rows().length > before || !more.isConnected) { seen.disconnect(); go(); }
      });
      seen.observe(found, { childList: true, subtree: true });
      setTimeout(go, 10_000);
    });
    more.dataset.more += `&rows=${Math.min(MAX_ROWS, wanted - before)}`;
    more.click();
    await changed;
    if (rows().length === before) break;
  }
  scrollTo(0, y);
  history.scrollRestoration = "auto";
}

if (found) {
  const place = history.state;
  addEventListener("pagehide", savePosition);
  // Some browsers do not send pagehide before they freeze a page.
  document.addEventListener("visibilitychange", () => { if (document.hidden) savePosition(); });
  if (place?.rows > rows().length) restorePosition(place);
}

// --- requests ----------------------------------------------------------------------------------

function toast(text, bad = false) {
  document.dispatchEvent(new CustomEvent("notice", { detail: { text, bad } }));
}

const agent = (found ?? $("#trash"))?.dataset.agent;
const ofAgent = agent && agent !== "main" ? `?${new URLSearchParams({ agent })}` : "";

async function api(method, key, act = "", body = undefined) {
  const response = await fetch(`/v1/sessions/${encodeURIComponent(key)}${act}${ofAgent}`, {
    method,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body ?? {}),
  }).catch(() => { throw new Error("Can't reach the gateway."); });
  if (response.ok) return response.json();
  const reply = await response.json().catch(() => ({}));
  throw new Error(reply.error?.message ?? response.statusText);
}

const sessions = (count) => (count === 1 ? "1 session" : `${count.toLocaleString("en")} sessions`);

// --- delete, archive ---------------------------------------------------------------------------

const actions = $("#chosen-actions");
const chosen = new Map();

function askToConfirm({ words, names, does, danger }) {
  const text = document.createElement("p");
  text.textContent = words;
  const list = document.createElement("ul");
  const shown = names.length > 8 ? [...names.slice(0, 8), `and ${names.length - 8} more`] : names;
  for (const name of shown) {
    const one = document.createElement("li");
    one.textContent = name;
    list.append(one);
  }
  const content = document.createDocumentFragment();
  content.append(text, list);
  const ready = (ok) => {
    if (danger) ok.className = "danger";
    ok.nextElementSibling.focus();
  };
  return new Promise((answer) => {
    document.dispatchEvent(new CustomEvent("ask", { detail: { content, does, ready, answer } }));
  });
}

function showSelection() {
  const on = found.classList.contains("selecting");
  actions.hidden = !on;
  $("#chosen-count").textContent = `${chosen.size} selected`;
  for (const button of $$("[data-act]:not([data-act=none])", actions)) button.disabled = !chosen.size;
  for (const box of $$(".pick", found)) box.checked = chosen.has(box.value);
}

function setSelecting(on) {
  found.classList.toggle("selecting", on);
  $("#select").setAttribute("aria-pressed", String(on));
  if (!on) chosen.clear();
  showSelection();
}

const ACTS = {
  delete: {
    ask: (many) => `Move ${many} to the trash? You can restore them there.`,
    does: "Delete",
    danger: true,
    run: (key) => api("DELETE", key),
    done: (many) => `Moved ${many} to the trash.`,
  },
  archive: {
    ask: (many) => `Archive the summarized messages of ${many}? They stay readable and searchable.`,
    does: "Archive",
    run: (key) => api("POST", key, "/archive"),
    done: (many, results) => {
      const count = results.reduce((sum, { archived }) => sum + archived, 0);
      return count ? `Archived ${count.toLocaleString("en")} messages of ${many}.`
        : `Nothing to archive: ${many} had no summarized messages.`;
    },
  },
};

async function runAction({ ask, does, danger, run, done }) {
  const keys = [...chosen.keys()];
  const names = [...chosen.values()];
  if (!await askToConfirm({ words: ask(sessions(keys.length)), names, does, danger })) return;
  const results = [];
  let failure;
  for (const key of keys) {
    try {
      results.push(await run(key));
      if (danger) $$(".pick", found).find((box) => box.value === key)?.closest("li").remove();
      chosen.delete(key);
    } catch (error) {
      failure = error;
    }
  }
  if (failure) toast(`${sessions(keys.length - results.length)} failed: ${failure.message}`, true);
  else toast(done(sessions(results.length), results));
  if (failure) showSelection();
  else setSelecting(false);
}

if (actions) {
  $("#select").addEventListener("click", () => setSelecting(!found.classList.contains("selecting")));
  found.addEventListener("change", ({ target }) => {
    if (!target.matches(".pick")) return;
    if (target.checked) chosen.set(target.value, $(".title", target.closest("li")).textContent.trim());
    else chosen.delete(target.value);
    showSelection();
  });
  // While selecting, a click anywhere on a row selects it.
  found.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (!row || !found.classList.contains("selecting") || event.target.matches(".pick")) return;
    event.preventDefault();
    $(".pick", row).click();
  });
  // Rows that were loaded or updated show their selection again.
  new MutationObserver(() => { if (chosen.size) showSelection(); })
    .observe(found, { childList: true, subtree: true });
  actions.addEventListener("click", ({ target }) => {
    const name = target.dataset.act;
    if (name === "none") setSelecting(false);
    else if (name) runAction(ACTS[name]);
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !$("dialog[open]") && !actions.hidden) setSelecting(false);
  });
}

// --- restore -----------------------------------------------------------------------------------

document.addEventListener("click", async ({ target }) => {
  const { restore: key, uid } = target.dataset;
  if (key === undefined) return;
  target.disabled = true;
  try {
    await api("POST", key, "/restore", { uid });
    target.closest("li").remove();
    toast(`Restored ${key}.`);
  } catch (error) {
    target.disabled = false;
    toast(error.message, true);
  }
});
