// Sets the theme that the reader chose before the first paint. Otherwise the system's theme is used.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch { /* without storage the system's theme is used */ }
