// The official openai package for Node: embeddings, one model, and the names of errors.
import assert from "node:assert/strict";
import OpenAI, { NotFoundError } from "openai";

const { BASE_URL, KEY, MODEL } = process.env;
const client = new OpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: KEY, maxRetries: 0 });

const input = ["rivers", "mountains", "rivers"];
const { data, usage } = await client.embeddings.create({ model: MODEL, input, encoding_format: "float" });
assert.deepEqual(data.map((each) => each.index), [0, 1, 2]);
assert.ok(near(data[0].embedding, data[2].embedding));
assert.ok(!near(data[0].embedding, data[1].embedding));
assert.ok(usage.prompt_tokens > 0);
// Without a format the package asks for base64 and decodes it
const packed = await client.embeddings.create({ model: MODEL, input: "rivers" });
assert.ok(near(packed.data[0].embedding, data[0].embedding));

const model = await client.models.retrieve(MODEL);
assert.deepEqual([model.id, model.object], [MODEL, "model"]);
await assert.rejects(client.models.retrieve("no-such-model"), NotFoundError);
console.log(JSON.stringify({ dimensions: data[0].embedding.length }));

function near(one, other) { // a batch of another size rounds differently
  return one.length === other.length && one.every((value, at) => Math.abs(value - other[at]) < 1e-4);
}
