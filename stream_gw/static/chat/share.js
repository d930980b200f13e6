// A link with which somebody else, or another device, watches an answer while it is written. It carries a capability
// token that reads this one stream until it expires, and does nothing else (docs/protocol.md).

import { $, copyText } from "../dom.js";
import { qrImage } from "./qr.js";

const EXPIRES_IN_S = 3600;

export class ShareDialog {
  constructor(session) {
    this.session = session;
    this.dialog = $("share");
    $("share-link").addEventListener("focus", ({ target }) => target.select());
    $("share-copy").addEventListener("click", () => this.copy());
    $("share-stop").addEventListener("click", () => this.stop());
    $("share-leave").addEventListener("click", () => this.dialog.close());
  }

  async open(stream) {
    this.stream = stream;
    $("share-link").value = "";
    $("share-code").replaceChildren();
    $("share-error").textContent = "";
    $("share-until").textContent = "Making the link…";
    $("share-copy").disabled = $("share-stop").disabled = true;
    $("share-copy").textContent = "Copy link";
    this.dialog.showModal();
    try {
      const { token, expiresAt } = await this.session.mintLink(stream, EXPIRES_IN_S);
      if (this.stream !== stream) return; // opened for another answer meanwhile
      const link = linkTo(stream, token);
      $("share-link").value = link;
      const code = qrImage(link, "QR code of the link");
      if (code) $("share-code").replaceChildren(code);
      const until = new Date(expiresAt * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
      $("share-until").textContent = `Valid until ${until}, or until you stop sharing.`;
      $("share-copy").disabled = $("share-stop").disabled = false;
      $("share-copy").focus();
    } catch (error) {
      if (this.stream !== stream) return;
      $("share-until").textContent = "";
      $("share-error").textContent = error.message;
    }
  }

  /** Ends every link to this answer, also those that were made before. */
  async stop() {
    const { stream } = this;
    $("share-stop").disabled = true;
    try {
      await this.session.endLinks(stream);
      if (this.stream !== stream) return;
      $("share-link").value = "";
      $("share-copy").disabled = true;
      $("share-until").textContent = "Nobody can watch this answer any more. Share it again for a new link.";
      $("share-leave").focus();
    } catch (error) {
      if (this.stream !== stream) return;
      $("share-stop").disabled = false;
      $("share-error").textContent = error.message;
    }
  }

  async copy() {
    const copied = await copyText($("share-link").value);
    $("share-copy").textContent = copied ? "Copied" : "Select and copy it";
    if (!copied) $("share-link").focus();
  }
}

/** The fragment is never sent to a server, so no log has the token. */
function linkTo(stream, token) {
  const link = new URL("/watch", location.origin);
  link.hash = new URLSearchParams({ stream, token });
  return link.href;
}
