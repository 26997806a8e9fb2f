package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"
)

// fetch is a program: it asks until the URL answers with the status, and prints
// the body.
//
//	exec fetch STATUS URL
func fetch() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: fetch STATUS URL")
		os.Exit(2)
	}
	want, err := strconv.Atoi(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	client := &http.Client{Timeout: 5 * time.Second}
	end := time.Now().Add(awaitTimeout)
	for {
		got, body, err := fetchOnce(client, os.Args[2])
		if err == nil && got == want {
			fmt.Print(body)
			return
		}
		if time.Now().After(end) {
			fmt.Fprintf(os.Stderr, "status %d, want %d (%v): %s\n", got, want, err, body)
			os.Exit(1)
		}
		<-time.After(20 * time.Millisecond)
	}
}

func fetchOnce(client *http.Client, url string) (status int, body string, err error) {
	res, err := client.Get(url)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	raw, err := io.ReadAll(res.Body)
	return res.StatusCode, string(raw), err
}
