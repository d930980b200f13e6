// Loaded before the page is drawn, so that a chosen theme never flashes the other one.
const theme = localStorage.getItem("sgw.theme");
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
