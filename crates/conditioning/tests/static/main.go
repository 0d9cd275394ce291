// A web server in Go, which makes its system calls itself.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

func main() {
	http.HandleFunc("/cgi/slow", func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(300 * time.Millisecond):
			fmt.Fprint(w, "done\n")
		case <-r.Context().Done():
			fmt.Fprintln(os.Stderr, "told that the client has left")
		}
	})
	http.HandleFunc("/cgi/echo", func(w http.ResponseWriter, r *http.Request) {
		n, _ := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%s %d\n", r.Method, n)
	})
	http.HandleFunc("/peer", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.RemoteAddr)
	})
	http.Handle("/", http.FileServer(http.Dir(os.Args[2])))
	fmt.Fprintln(os.Stderr, http.ListenAndServe(os.Args[1], nil))
	os.Exit(1)
}
