// The scenario with a client of oapi-codegen. Arguments: server URL, stream name.
package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"log"
	"os"

	"example.test/scenario/contrail"
)

const far = 3_000_000_000

var payloads = [][]byte{[]byte("first"), {0x00, 0xff, 0x01}, []byte("third")}

func to[T any](value T) *T { return &value }

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func publish(client *contrail.ClientWithResponses, subject string, payload []byte) int64 {
	answer := must(client.PublishWithBodyWithResponse(
		context.Background(), subject, nil, "application/octet-stream", bytes.NewReader(payload)))
	return answer.JSON201.Seq
}

func main() {
	url, stream := os.Args[1], os.Args[2]
	ctx := context.Background()
	client := must(contrail.NewClientWithResponses(url))

	config := contrail.StreamConfigBody{
		Name: &stream, Subjects: &[]string{stream + ".>"}, MaxAge: to("1h"),
	}
	must(client.CreateStreamWithResponse(ctx, nil, config))
	published := []int64{}
	for _, payload := range payloads {
		published = append(published, publish(client, stream+".a", payload))
	}

	worker := contrail.ConsumerConfigBody{Name: to("worker")}
	must(client.CreateConsumerWithResponse(ctx, stream, nil, worker))
	pulled := must(client.PullWithResponse(ctx, stream, "worker", nil,
		contrail.PullBody{Batch: to(int32(3)), Expires: to("5s")})).JSON200
	sequences, acks := []int64{}, []contrail.AckRequest{}
	for _, message := range pulled.Messages {
		sequences = append(sequences, message.Seq)
		acks = append(acks, contrail.AckRequest{Token: message.AckToken})
	}
	settled := must(client.AcknowledgeWithResponse(ctx, stream, "worker",
		contrail.AckBody{Acks: acks, Sync: to(true)})).JSON200
	acked := []bool{}
	for _, result := range settled.Results {
		acked = append(acked, *result.Ok)
	}
	payload := must(client.GetMessageWithResponse(ctx, stream, 2, nil)).Body

	etag := must(client.GetStreamWithResponse(ctx, stream, nil)).HTTPResponse.Header.Get("ETag")
	config.Description = to("guarded")
	guard := contrail.PutStreamParams{IfMatch: &etag}
	updated := must(client.PutStreamWithResponse(ctx, stream, &guard, config)).JSON200
	stale := must(client.PutStreamWithResponse(ctx, stream, &guard, config)).ApplicationproblemJSON412
	missing := must(client.GetStreamWithResponse(ctx, "NONE", nil)).ApplicationproblemJSON404

	farName := stream + "-far"
	must(client.CreateStreamWithResponse(ctx, nil, contrail.StreamConfigBody{
		Name: &farName, Subjects: &[]string{farName}, FirstSeq: to(int64(far)),
	}))
	farSeq := publish(client, farName, []byte("far"))
	farMessage := must(client.GetMessageJsonWithResponse(ctx, farName, farSeq, nil)).JSON200

	must(0, json.NewEncoder(os.Stdout).Encode(map[string]any{
		"published": published,
		"pulled":    sequences,
		"acked":     acked,
		"payload":   hex.EncodeToString(payload),
		"updated":   updated.Config.Description,
		"stale":     []any{stale.Status, stale.Name},
		"missing":   []any{missing.Status, missing.Code, missing.Name},
		"far":       []any{farSeq, farMessage.Seq, *farMessage.Data},
	}))
}
