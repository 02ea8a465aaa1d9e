// Sets the theme that the reader chose, before the first paint. The default is the system's theme.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
} catch { /* without storage the system's theme is used */ }
