// Runs before the page is drawn. Shows the message box or the sign-in while the modules are on their way, and keeps
// what is sent meanwhile. main.js takes over when it sets `data-ready`. A message that is not sent outlives a reload.

{
  const DRAFT = "sgw.draft";
  const root = document.documentElement;
  const isEarly = () => root.dataset.ready === undefined;
  const say = (id, text) => (document.getElementById(id === "composer" ? "notice" : "sign-in-error").textContent = text);

  try {
    const hasKey = new URLSearchParams(location.hash.slice(1)).has("key") || sessionStorage.getItem("sgw.key") !== null;
    if (hasKey) root.dataset.shows = "app";
    // A browser that was signed in may have a tab that lends its token: main.js asks
    else if (localStorage.getItem("sgw.user") === null) root.dataset.shows = "gate";
  } catch {
    // The browser denies the page its storage: main.js decides.
  }

  const draft = () => document.getElementById("prompt");
  document.addEventListener("DOMContentLoaded", () => {
    try {
      draft().value ||= sessionStorage.getItem(DRAFT) ?? "";
    } catch {
      // There is none.
    }
  });
  addEventListener("pagehide", () => {
    try {
      sessionStorage.setItem(DRAFT, draft().value);
    } catch {
      // It is lost with the page.
    }
  });

  addEventListener(
    "submit",
    (event) => {
      if (!isEarly()) return;
      event.preventDefault();
      root.dataset.sends = event.target.id;
      say(event.target.id, "The page is still loading. This is sent as soon as it is there.");
    },
    true,
  );
  addEventListener(
    "input",
    ({ target }) => {
      if (!isEarly() || !target.form) return;
      delete root.dataset.sends; // the text goes on
      say(target.form.id, "");
      if (target.id === "prompt") document.getElementById("send").disabled = !target.value.trim();
    },
    true,
  );
  addEventListener(
    "keydown",
    (event) => {
      if (!isEarly() || event.target.id !== "prompt" || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (event.target.value.trim()) event.target.form.requestSubmit();
    },
    true,
  );
}
