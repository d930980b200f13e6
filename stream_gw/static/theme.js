// Loaded before the page is drawn, so that a chosen theme never flashes the other one.
try {
  const theme = localStorage.getItem("sgw.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // The browser denies the page its storage: the theme is the system's.
}
