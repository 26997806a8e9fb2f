package httpguard_test

import (
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"

	"github.com/headlease/headlease/fence"
	"github.com/headlease/headlease/fence/httpguard"
	"github.com/headlease/headlease/fence/inprocess"
)

func ExampleGuard_Wrap() {
	guard, err := httpguard.New(httpguard.Config{Store: inprocess.New(inprocess.Options{}), Replicas: 1})
	if err != nil {
		log.Fatal(err) // for example: 3 replicas, and no store that they share
	}
	server := httptest.NewServer(guard.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, "shipped")
	})))
	defer server.Close()

	ship := func(token fence.Token, claim bool) {
		req, _ := http.NewRequest(http.MethodPost, server.URL, nil)
		httpguard.SetHeaders(req.Header, "orders/7", token, claim)
		res, err := server.Client().Do(req)
		if err != nil {
			log.Fatal(err)
		}
		defer func() { _ = res.Body.Close() }()
		fmt.Println(res.StatusCode, httpguard.Refusal(res) != nil)
	}
	older, _ := fence.NewToken(1, 1)
	newer, _ := fence.NewToken(1, 2)
	ship(older, true)  // the first request of a holder claims
	ship(newer, true)  // the next holder's
	ship(older, false) // too late
	// Output:
	// 200 false
	// 200 false
	// 412 true
}
