// Runs before the page is drawn, so that a chosen theme never flashes the other one. Loads a page again whose modules
// or styles did not all come: its script would never run.

try {
  const theme = localStorage.getItem("sgw.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // The browser denies the page its storage: the theme is the system's.
}

{
  const PAUSE_MS = [1000, 2000, 4000, 8000, 15_000]; // before each reload in a row; then the reader decides
  const RELOADS = "sgw.reloads";
  let isBroken = false;

  const later = (work, pauseMs) => setTimeout(() => work(pauseMs), pauseMs);

  /** Reloads only where the gateway answers: the browser's own error page would not come back by itself. */
  const reload = (pauseMs) =>
    fetch(location.pathname, { method: "HEAD", cache: "no-store" }).then(
      () => location.reload(),
      () => later(reload, Math.min(pauseMs * 2, 15_000)),
    );

  const mend = () => {
    isBroken = true;
    let done = PAUSE_MS.length;
    try {
      done = Number(sessionStorage.getItem(RELOADS));
      sessionStorage.setItem(RELOADS, done + 1);
    } catch {
      // Without storage nobody counts the reloads, so there is none.
    }
    const isLast = done >= PAUSE_MS.length;
    const told = document.createElement("p");
    told.className = "broken";
    told.setAttribute("role", "alert");
    told.textContent = `Parts of this page did not come. ${isLast ? "Reload it to try again." : "Trying again …"}`;
    (document.body ?? document.documentElement).append(told); // a stylesheet may fail before there is a body
    if (!isLast) later(reload, PAUSE_MS[done]);
  };

  const isNeeded = ({ type, rel }) => type === "module" || rel === "stylesheet";
  addEventListener("error", ({ target }) => !isBroken && isNeeded(target) && mend(), true);
  addEventListener("load", () => {
    try {
      if (!isBroken) sessionStorage.removeItem(RELOADS);
    } catch {
      // There is no count either.
    }
  });
}
