// Before the first paint: the look that was chosen here, else the system's.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch { /* without storage the system decides */ }
