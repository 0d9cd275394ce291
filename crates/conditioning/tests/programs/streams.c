/* Servers that read or write by libc's streams. usage: streams PORT one|two|write|dprintf|standard
 * one: one stream for both directions; two: one for each; write: reads by read(2), writes by a stream; dprintf: likewise,
 * without a stream; standard: a process for each connection, which is its standard input and output. */
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "listens.h"

static const char *style;

static int is(const char *name) { return strcmp(style, name) == 0; }

/* Answers requests until there are no more. */
static void converse(FILE *in, FILE *out)
{
    char line[4096], method[16], path[1024], body[2048];
    while (fgets(line, sizeof line, in) && sscanf(line, "%15s %1023s", method, path) == 2) {
        long length = 0, got = 0;
        while (fgets(line, sizeof line, in) && strcmp(line, "\r\n") != 0)
            if (strncasecmp(line, "content-length:", 15) == 0)
                length = atol(line + 15);
        while (got < length && fgetc(in) != EOF)
            got++;
        int size = snprintf(body, sizeof body, "%s %s %ld\n", method, path, got);
        fprintf(out, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", size, body);
        if (is("standard"))
            exit(0);
        fflush(out);
    }
}

static void *serve(void *argument)
{
    int client = (int)(long)argument;
    if (is("one")) {
        FILE *both = fdopen(client, "r+");
        if (fileno(both) == client)
            converse(both, both);
        fclose(both);
    } else if (is("two")) {
        FILE *in = fdopen(client, "r"), *out = fdopen(dup(client), "w");
        converse(in, out);
        fclose(out);
        fclose(in);
    } else {
        char request[65536], method[16], path[1024], body[2048];
        FILE *out = is("write") ? fdopen(dup(client), "w") : NULL;
        ssize_t got;
        while ((got = read(client, request, sizeof request - 1)) > 0) {
            request[got] = 0;
            if (sscanf(request, "%15s %1023s", method, path) != 2)
                break;
            int size = snprintf(body, sizeof body, "%s %s 0\n", method, path);
            const char *format = "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s";
            if (out) {
                fprintf(out, format, size, body);
                fflush(out);
            } else
                dprintf(client, format, size, body);
        }
        if (out)
            fclose(out);
        close(client);
    }
    return NULL;
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    style = arguments[2];
    signal(SIGPIPE, SIG_IGN);
    signal(SIGCHLD, SIG_IGN);
    int listener = listens_at(arguments[1], SOCK_STREAM);
    if (listener < 0)
        return 1;
    for (;;) {
        int client = accept(listener, NULL, NULL);
        if (client < 0)
            continue;
        if (is("standard")) {
            if (fork() == 0) {
                dup2(client, 0);
                dup2(client, 1);
                close(client);
                converse(stdin, stdout);
                exit(0);
            }
            close(client);
            continue;
        }
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, (void *)(long)client) == 0)
            pthread_detach(thread);
        else
            close(client);
    }
}
