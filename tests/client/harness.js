async ({ target, script }) => {
  const sg = await import("/static/client.js");
  const states = [];
  const options = { url: location.origin, token: target.key, onState: (state) => states.push(state) };
  const gateway = new sg.StreamGateway(options);
  const body = (prompt = "Tell me a story.", tokens = 40) => ({
    model: target.model,
    max_tokens: tokens,
    messages: [{ role: "user", content: prompt }],
  });
  const assert = (holds, message) => {
    if (!holds) throw new Error(message);
  };
  const equal = (a, b) => {
    const [left, right] = [JSON.stringify(a), JSON.stringify(b)];
    assert(left === right, `${left} is not ${right}`);
  };
  const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  const read = async (stream) => {
    let text = "";
    for await (const part of stream.text()) text += part;
    return text;
  };
  const first = async (stream, items) => {
    while (items > 0) {
      const { value } = await stream.next();
      if (value.type === "data" && value.chunks.length > 0) items -= 1;
    }
  };
  const fails = async (promise) => {
    try {
      await promise;
    } catch (error) {
      return error;
    }
    throw new Error("did not fail");
  };
  const network = {
    cut: () => networkCall("cut"),
    refuse: () => networkCall("refuse"),
    accept: () => networkCall("accept"),
  };
  const names = { sg, gateway, options, body, assert, equal, sleep, read, first, fails, network, states, target };
  const AsyncFunction = (async () => {}).constructor;
  try {
    return await new AsyncFunction(...Object.keys(names), script)(...Object.values(names));
  } finally {
    gateway.close();
  }
}
