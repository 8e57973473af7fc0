import com.fasterxml.jackson.databind.ObjectMapper;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import org.openapitools.client.ApiClient;
import org.openapitools.client.ApiException;
import org.openapitools.client.api.ConsumersApi;
import org.openapitools.client.api.DeliveryApi;
import org.openapitools.client.api.PublishingApi;
import org.openapitools.client.api.ReadingApi;
import org.openapitools.client.api.StreamsApi;
import org.openapitools.client.model.AckBody;
import org.openapitools.client.model.AckOutcome;
import org.openapitools.client.model.AckRequest;
import org.openapitools.client.model.BatchResult;
import org.openapitools.client.model.ConsumerConfigBody;
import org.openapitools.client.model.DeliveredMessage;
import org.openapitools.client.model.JsonBatch;
import org.openapitools.client.model.Message;
import org.openapitools.client.model.MessageItem;
import org.openapitools.client.model.Problem;
import org.openapitools.client.model.PulledMessages;
import org.openapitools.client.model.PullBody;
import org.openapitools.client.model.StreamConfigBody;
import org.openapitools.client.model.StreamInfoJson;

/** The scenario with a Java client of openapi-generator. Arguments: server URL, stream name. */
public final class Scenario {
  private static final long FAR = 3_000_000_000L;
  private static final List<byte[]> PAYLOADS =
      List.of(utf8("first"), new byte[] {0, (byte) 0xff, 1}, utf8("third"));

  private final ApiClient client = new ApiClient();
  private final ObjectMapper json = ApiClient.createDefaultObjectMapper();

  private static byte[] utf8(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  private interface Call {
    void run() throws ApiException;
  }

  private Problem refused(Call call) throws Exception {
    try {
      call.run();
    } catch (ApiException error) {
      return json.readValue(error.getResponseBody(), Problem.class);
    }
    throw new AssertionError("nothing was refused");
  }

  /** Stores payloads in a batch: this generator writes a body of bytes as JSON of the file's name. */
  private List<Long> publish(String stream, String subject, List<byte[]> payloads)
      throws ApiException {
    JsonBatch batch = new JsonBatch();
    payloads.forEach(
        one -> batch.addMessagesItem(new MessageItem().subject(subject).dataBase64(one)));
    return new PublishingApi(client)
        .publishBatch(stream, batch, null, null, null).getResults().stream().map(BatchResult::getSeq).toList();
  }

  private Map<String, Object> run(String url, String stream) throws Exception {
    client.updateBaseUri(url);
    StreamsApi streams = new StreamsApi(client);
    ReadingApi reading = new ReadingApi(client);
    DeliveryApi delivery = new DeliveryApi(client);

    StreamConfigBody config =
        new StreamConfigBody().name(stream).addSubjectsItem(stream + ".>").maxAge("1h");
    streams.createStream(config, null);
    List<Long> published = publish(stream, stream + ".a", PAYLOADS);

    new ConsumersApi(client).createConsumer(stream, new ConsumerConfigBody().name("worker"), null);
    PulledMessages pulled =
        delivery.pull(stream, "worker", null, new PullBody().batch(3).expires("5s"));
    AckBody acks = new AckBody().sync(true);
    pulled.getMessages().forEach(one -> acks.addAcksItem(new AckRequest().token(one.getAckToken())));
    List<Boolean> acked =
        delivery.acknowledge(stream, "worker", acks).getResults().stream()
            .map(AckOutcome::getOk)
            .toList();
    byte[] payload =
        Files.readAllBytes(reading.getMessage(stream, 2L, null, null, null).toPath());

    String etag =
        streams.getStreamWithHttpInfo(stream, null).getHeaders().get("etag").get(0);
    config.setDescription("guarded");
    StreamInfoJson updated = streams.putStream(stream, config, null, etag, null);
    Problem stale = refused(() -> streams.putStream(stream, config, null, etag, null));
    Problem missing = refused(() -> streams.getStream("NONE", null));

    String far = stream + "-far";
    streams.createStream(
        new StreamConfigBody().name(far).addSubjectsItem(far).firstSeq(FAR), null);
    long farSeq = publish(far, far, List.of(utf8("far"))).get(0);
    Message farMessage = reading.getMessageJson(far, farSeq, null, null, null);
    return Map.of(
        "published", published,
        "pulled", pulled.getMessages().stream().map(DeliveredMessage::getSeq).toList(),
        "acked", acked,
        "payload", HexFormat.of().formatHex(payload),
        "updated", updated.getConfig().getDescription(),
        "stale", List.of(stale.getStatus(), stale.getName()),
        "missing", List.of(missing.getStatus(), missing.getCode(), missing.getName()),
        "far", List.of(farSeq, farMessage.getSeq(), farMessage.getData()));
  }

  public static void main(String[] arguments) throws Exception {
    Scenario scenario = new Scenario();
    System.out.println(
        scenario.json.writeValueAsString(scenario.run(arguments[0], arguments[1])));
  }
}
