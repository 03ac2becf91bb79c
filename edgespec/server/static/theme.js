// Runs before the page is drawn, so that a chosen theme does not flash.
try {
  const theme = JSON.parse(localStorage.getItem("edgespec.preferences") || "{}").theme;
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is off or unreadable: the system's theme */ }
