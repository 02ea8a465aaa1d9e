// Script of the sign-in page: copies the command. The page works without this script.
const copy = document.querySelector("[data-copy]");
copy.hidden = !navigator.clipboard;
copy.addEventListener("click", async () => {
  await navigator.clipboard.writeText(copy.dataset.copy);
  copy.textContent = "Copied";
});
