// The scenario with openapi-fetch over types of openapi-typescript. Arguments: server URL, stream name.
import createClient from "openapi-fetch";
import type { paths } from "./schema";

declare const process: { argv: string[] };

const FAR = 3_000_000_000;
const PAYLOADS = [new TextEncoder().encode("first"), new Uint8Array([0, 255, 1]), new TextEncoder().encode("third")];

async function main(url: string, stream: string) {
  const client = createClient<paths>({ baseUrl: url });

  async function publish(subject: string, payload: Uint8Array): Promise<number> {
    const { data } = await client.POST("/v1/subjects/{subject}/messages", {
      params: { path: { subject } },
      body: payload as never,
      bodySerializer: (body) => body,
      headers: { "Content-Type": "application/octet-stream" },
    });
    return data!.seq;
  }

  const body = { name: stream, subjects: [`${stream}.>`], max_age: "1h" };
  await client.POST("/v1/streams", { body });
  const published: number[] = [];
  for (const payload of PAYLOADS) published.push(await publish(`${stream}.a`, payload));

  await client.POST("/v1/streams/{stream}/consumers", {
    params: { path: { stream } },
    body: { name: "worker" },
  });
  const worker = { path: { stream, consumer: "worker" } };
  const pulled = await client.POST("/v1/streams/{stream}/consumers/{consumer}/next", {
    params: worker,
    body: { batch: 3, expires: "5s" },
  });
  const messages = pulled.data!.messages;
  const settled = await client.POST("/v1/streams/{stream}/consumers/{consumer}/ack", {
    params: worker,
    body: { acks: messages.map((message) => ({ token: message.ack_token })), sync: true },
  });
  const payload = await client.GET("/v1/streams/{stream}/messages/{seq}", {
    params: { path: { stream, seq: 2 } },
    parseAs: "arrayBuffer",
  });

  const found = await client.GET("/v1/streams/{stream}", { params: { path: { stream } } });
  const params = { path: { stream }, header: { "If-Match": found.response.headers.get("etag")! } };
  const guarded = { params, body: { ...body, description: "guarded" } };
  const updated = await client.PUT("/v1/streams/{stream}", guarded);
  const stale = (await client.PUT("/v1/streams/{stream}", guarded)).error!;
  const missing = (await client.GET("/v1/streams/{stream}", { params: { path: { stream: "NONE" } } })).error!;

  const far = `${stream}-far`;
  await client.POST("/v1/streams", { body: { name: far, subjects: [far], first_seq: FAR } });
  const farSeq = await publish(far, new TextEncoder().encode("far"));
  const farMessage = await client.GET("/v1/streams/{stream}/messages/{seq}/json", {
    params: { path: { stream: far, seq: farSeq } },
  });
  return {
    published,
    pulled: messages.map((message) => message.seq),
    acked: settled.data!.results.map((result) => result.ok),
    payload: [...new Uint8Array(payload.data!)].map((byte) => byte.toString(16).padStart(2, "0")).join(""),
    updated: updated.data!.config.description,
    stale: [stale.status, stale.name],
    missing: [missing.status, missing.code, missing.name],
    far: [farSeq, farMessage.data!.seq, farMessage.data!.data],
  };
}

main(process.argv[2]!, process.argv[3]!).then((seen) => console.log(JSON.stringify(seen)));
