// The page that a shared link opens: one answer, read only. The fragment has the stream and a token that reads it.

import { BEGINNING, GatewayError, StreamGateway } from "../client.js";
import { $, el, icon, themeButton } from "../dom.js";
import { Answer } from "./answer.js";
import { Reach, showConnection } from "./connection.js";
import { MessageView } from "./view.js";

const NEAR_END_PX = 120;
const REFUSALS = {
  invalid_api_key: "This link has expired, or sharing was stopped.",
  link_ended: "Sharing was stopped.",
  forbidden: "This link is not valid.",
  not_found: "This answer is no longer kept.",
};

const link = new URLSearchParams(location.hash.slice(1));
const message = {
  id: "watched",
  role: "assistant",
  text: "",
  status: "running",
  stream: link.get("stream"),
  cursor: BEGINNING,
  revision: 0,
};
const view = new MessageView(message, {});
let told = false;
const reach = new Reach(() => onState("reconnecting"));

function onState(state, { error } = {}) {
  const shown = reach.shown(state, error);
  if (shown !== "closed") showConnection(shown);
  view.setLink(shown);
}

function onAnswer(answer) {
  const page = document.documentElement;
  const follows = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_END_PX;
  view.schedule(message, () => {
    if (follows) page.scrollTop = page.scrollHeight;
  });
  if (!answer.isOver || told) return;
  told = true;
  const { error } = message;
  if (error && REFUSALS[error.code]) {
    if (message.text === "") {
      refuse(REFUSALS[error.code]);
      return;
    }
    message.status = "failed";
    error.message = REFUSALS[error.code];
    view.schedule(message, () => {});
  }
  $("connection").hidden = true;
  $("title").textContent = "The answer";
  $("about").textContent = "It has ended. The link shows it for a few minutes more.";
  $("announce").textContent = message.status === "failed" ? "The answer failed." : "The answer is complete.";
}

function refuse(text) {
  $("connection").hidden = true;
  $("about").hidden = true;
  $("title").textContent = "Nothing to watch";
  $("log").replaceChildren(el("p", "note failed", icon("alert"), el("span", "", text)));
}

function start() {
  const token = link.get("token");
  if (!message.stream || !token) refuse(REFUSALS.forbidden);
  else {
    $("log").append(view.node);
    const gateway = new StreamGateway({ url: location.origin, token, onState });
    const store = { save() {} }; // nothing of it is kept in this browser
    const makeBody = () => {
      throw new GatewayError("forbidden", REFUSALS.forbidden);
    };
    new Answer({ gateway, store, message, makeBody, onChange: onAnswer });
  }
}

addEventListener("hashchange", () => location.reload());
themeButton($("theme"));
start();
