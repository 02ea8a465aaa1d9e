// Copy buttons, covered secrets, and zoomed pictures. All listeners are on the document, so that
// they also work for messages that arrive later.

const session = document.querySelector("#session");

function announce(text, bad = false) {
  const detail = { text, bad, milliseconds: bad ? 6000 : 2000 };
  document.dispatchEvent(new CustomEvent("notice", { detail }));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // On hosts other than localhost, browsers offer the clipboard API only with HTTPS.
    if (!copySelected(text)) {
      announce("Cannot copy. Select the text and press Ctrl-C.", true);
      return;
    }
  }
  announce("Copied");
}

function copySelected(text) {
  const field = document.createElement("textarea");
  const before = document.activeElement;
  field.value = text;
  field.className = "copy-field";
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}

// Secrets that are still covered are copied as `[redacted: kind]`.
function stub(secret) {
  return `[redacted: ${secret.dataset.kind}]`;
}

function isCovered(secret) {
  return secret.getAttribute("aria-pressed") !== "true";
}

function textOf(element) {
  const copied = element.cloneNode(true);
  for (const secret of copied.querySelectorAll(".secret")) {
    secret.replaceWith(isCovered(secret) ? stub(secret) : secret.dataset.secret);
  }
  return copied.textContent;
}

function blockText(block) {
  const list = block.querySelector(".checklist");
  if (list) return [...list.children].map((one) => textOf(one).trim()).join("\n");
  return [...block.querySelectorAll("pre")].map(textOf).join("\n");
}

async function messageText(article) {
  const query = new URLSearchParams({
    agent: session.dataset.agent, after: article.dataset.seq - 1, limit: 1, full: true,
  });
  const answer = await fetch(`${session.dataset.api}/messages?${query}`);
  if (!answer.ok) return textOf(article.querySelector(".words"));
  const { content } = (await answer.json()).messages[0].message;
  let text = content;
  if (Array.isArray(content)) {
    text = content.map((part) => part?.text ?? (typeof part === "string" ? part : ""))
      .filter(Boolean).join("\n\n");
  }
  if (typeof text !== "string" || !text) return textOf(article.querySelector(".words"));
  for (const secret of article.querySelectorAll(".words .secret")) {
    if (isCovered(secret)) text = text.replaceAll(secret.dataset.secret, () => stub(secret));
  }
  return text;
}

const sources = {
  code: (button) => textOf(button.parentElement.querySelector("pre")).replace(/\n$/, ""),
  block: (button) => blockText(button.parentElement),
  message: (button) => messageText(button.closest("article")),
  link: (button) => {
    const { seq } = button.closest("article").dataset;
    const address = new URL(location.href);
    address.searchParams.set("at", seq);
    address.hash = `m${seq}`;
    return address.href;
  },
  key: () => session.dataset.key,
};

function toggleSecret(secret) {
  const shown = isCovered(secret);
  secret.setAttribute("aria-pressed", String(shown));
  secret.textContent = shown ? secret.dataset.secret : `${secret.dataset.kind} ••••••`;
  secret.title = `${shown ? "Hide" : "Show"} this ${secret.dataset.kind}`;
}

function zoom(picture) {
  const dialog = document.createElement("dialog");
  dialog.className = "zoom";
  dialog.setAttribute("aria-label", picture.alt || "Picture");
  const large = document.createElement("img");
  large.src = picture.src;
  large.alt = picture.alt;
  dialog.append(large);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { dialog.remove(); picture.focus(); });
  document.body.append(dialog);
  dialog.showModal();
}

const PICTURES = "img[data-zoom], .words img";

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) {
    event.preventDefault();
    try {
      await copy(await sources[button.dataset.copy](button));
    } catch (error) {
      announce(`Cannot copy: ${error.message}`, true);
    }
    return;
  }
  const secret = event.target.closest("button.secret");
  if (secret) toggleSecret(secret);
  const picture = event.target.closest(PICTURES);
  if (picture && !picture.closest("a")) zoom(picture);
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches?.(PICTURES)) {
    event.preventDefault();
    event.stopPropagation();
    zoom(event.target);
  }
}, true);
