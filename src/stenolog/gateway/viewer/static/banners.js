// Banners: restores a deleted session, and shows the progress while sessions are indexed.

const restore = document.querySelector("#restore");
restore?.addEventListener("click", async () => {
  restore.disabled = true;
  const { api, agent } = document.querySelector("#session").dataset;
  const suffix = agent === "main" ? "" : `?agent=${encodeURIComponent(agent)}`;
  const response = await fetch(`${api}/restore${suffix}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: "{}",
  }).catch(() => null);
  if (response?.ok) { location.reload(); return; }
  const reply = await response?.json().catch(() => null);
  document.querySelector("#restore-problem").textContent =
    reply?.error?.message ?? "Can't reach the gateway.";
  restore.disabled = false;
});

const indexing = document.querySelector("#indexing");
if (indexing && !indexing.hidden) {
  const show = async () => {
    const response = await fetch("/indexing").catch(() => null);
    const progress = response?.ok ? await response.json() : undefined;
    if (progress) {
      const count = (number) => number.toLocaleString("en-US");
      indexing.querySelector("span").textContent =
        `Indexed ${count(progress.indexed)} of ${count(progress.sessions)} sessions. ` +
        "Search finds only indexed sessions.";
    } else if (progress === null) {
      indexing.querySelector("span").textContent = "All sessions are indexed.";
      indexing.querySelector("a").hidden = false;
      return;
    }
    setTimeout(show, 1000);
  };
  setTimeout(show, 1000);
}
