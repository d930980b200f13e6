// The browser client, under the address that pages import. Its source and npm package are in clients/js.

export * from "./client/index.js";
