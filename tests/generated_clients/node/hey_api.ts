// The scenario with a client of @hey-api/openapi-ts. Arguments: server URL, stream name.
import { client } from "./hey/client.gen";
import * as contrail from "./hey";

declare const process: { argv: string[] };

const FAR = 3_000_000_000;
const PAYLOADS = [new Blob(["first"]), new Blob([new Uint8Array([0, 255, 1])]), new Blob(["third"])];

async function publish(subject: string, body: Blob): Promise<number> {
  const { data } = await contrail.publish({ path: { subject }, body });
  return (data as contrail.PublishAckJson).seq;
}

async function main(url: string, stream: string) {
  client.setConfig({ baseUrl: url });

  const body = { name: stream, subjects: [`${stream}.>`], max_age: "1h" };
  await contrail.createStream({ body });
  const published: number[] = [];
  for (const payload of PAYLOADS) published.push(await publish(`${stream}.a`, payload));

  await contrail.createConsumer({ path: { stream }, body: { name: "worker" } });
  const path = { stream, consumer: "worker" };
  const pulled = await contrail.pull({ path, body: { batch: 3, expires: "5s" } });
  const { messages } = pulled.data as contrail.PulledMessages;
  const settled = await contrail.acknowledge({
    path,
    body: { acks: messages.map((message) => ({ token: message.ack_token })), sync: true },
  });
  const payload = await contrail.getMessage({ path: { stream, seq: 2 } });
  const bytes = new Uint8Array(await payload.data!.arrayBuffer());

  const found = await contrail.getStream({ path: { stream } });
  const guarded = {
    path: { stream },
    headers: { "If-Match": found.response!.headers.get("etag")! },
    body: { ...body, description: "guarded" },
  };
  const updated = await contrail.putStream(guarded);
  const stale = (await contrail.putStream(guarded)).error!;
  const missing = (await contrail.getStream({ path: { stream: "NONE" } })).error!;

  const far = `${stream}-far`;
  await contrail.createStream({ body: { name: far, subjects: [far], first_seq: FAR } });
  const farSeq = await publish(far, new Blob(["far"]));
  const farMessage = await contrail.getMessageJson({ path: { stream: far, seq: farSeq } });
  return {
    published,
    pulled: messages.map((message) => message.seq),
    acked: settled.data!.results.map((result) => result.ok),
    payload: [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join(""),
    updated: updated.data!.config.description,
    stale: [stale.status, stale.name],
    missing: [missing.status, missing.code, missing.name],
    far: [farSeq, farMessage.data!.seq, farMessage.data!.data],
  };
}

main(process.argv[2]!, process.argv[3]!).then((seen) => console.log(JSON.stringify(seen)));
