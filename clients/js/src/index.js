// Client of stream-gw for browsers and Node. docs/protocol.md of stream-gw describes the wire.
//
//   const gateway = new StreamGateway({ url: "https://gw.example", getToken });
//   const stream = gateway.create({ model, messages });
//   for await (const text of stream.text()) show(text);
//
// One socket carries every stream. A Stream applies only the frame after its cursor, so its reader sees each frame
// once and in order, also after reconnects.

export { GatewayError } from "./errors.js";
export { StreamGateway } from "./gateway.js";
export { LIMITS } from "./limits.js";
export { backoffMs, randomId } from "./random.js";
export { Stream } from "./stream.js";
export { BEGINNING, SUBPROTOCOL, socketUrl, textOf } from "./wire.js";
