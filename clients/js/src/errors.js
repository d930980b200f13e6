export class GatewayError extends Error {
  constructor(code, message, { retriable = false, retryAfterS = null, requestId = null, closeCode = null } = {}) {
    super(message);
    this.name = "GatewayError";
    Object.assign(this, { code, retriable, retryAfterS, requestId, closeCode });
  }

  static fromWire(error) {
    return new GatewayError(error.code ?? "internal_error", error.message ?? "The gateway reported an error.", {
      retriable: error.retriable === true,
      retryAfterS: error.retry_after_s ?? null,
      requestId: error.request_id ?? null,
    });
  }
}

export const closedError = () => new GatewayError("client_closed", "The client was closed.");
