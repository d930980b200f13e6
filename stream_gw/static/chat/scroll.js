// The view follows the growing text until the reader scrolls up.

import { $ } from "../dom.js";

const NEAR_END_PX = 80; // distance from the end within which the view follows the text
const scroller = $("scroller");

const isNearEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;

let follows = true;
let scrolledTo = 0;

/** Shows the newest text, if the view follows it. */
export function scrollOn() {
  if (follows) scroller.scrollTop = scroller.scrollHeight;
  $("latest").hidden = follows || isNearEnd();
}

/** Makes the view follow the text again. */
export function follow() {
  follows = true;
}

scroller.addEventListener("scroll", () => {
  // Only the reader scrolls upwards: growing text moves the end, never the position.
  if (scroller.scrollTop < scrolledTo - 1) follows = isNearEnd();
  else if (isNearEnd()) follows = true;
  scrolledTo = scroller.scrollTop;
  $("latest").hidden = follows || isNearEnd();
});

$("latest").addEventListener("click", () => {
  follows = true;
  scrollOn();
  $("prompt").focus();
});
