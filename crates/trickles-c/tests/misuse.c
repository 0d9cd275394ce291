/* Wrong arguments: each is refused with an error, and the client is answered all the same. */
#include "tidegate_trickles.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, strerror(errno)); \
            exit(1); \
        } \
    } while (0)

/* The call fails with the error. */
#define FAILS(error, call) \
    do { \
        errno = 0; \
        CHECK((call) == -1); \
        CHECK(errno == (error)); \
    } while (0)

static void ask(const char *address)
{
    char text[64];
    int fd = msk_connect(address);
    CHECK(fd >= 0);
    FAILS(EINVAL, msk_request(fd, NULL, 5, 10));
    FAILS(EINVAL, msk_request(fd, (char *)"x", -1, 10));
    FAILS(EINVAL, msk_request(fd, (char *)"x", 1, -1));
    CHECK(msk_request(fd, (char *)"hello", 5, sizeof text) == 2);
    FAILS(EINVAL, msk_response(fd, NULL, 2));
    CHECK(msk_response(fd, text, (size_t)-1) == 2 && memcmp(text, "ok", 2) == 0);
    CHECK(msk_close(fd) == 0);
    FAILS(EBADF, msk_close(fd));
    FAILS(EBADF, msk_request(fd, (char *)"x", 1, 1));
    exit(0);
}

static void answer(int fd, minisock *msk)
{
    static char large[sizeof(msk_ucont) + 769];
    msk_ucont ucont = {.kind = MSK_OUTPUT, .request = 1, .start = 0, .end = 2};
    msk_collection event;
    extract_mskdesc_in twice[2] = {{msk}, {msk}};
    tiovec vec = {.pkt = 0, .request = 1, .offset = 0, .data = "ok", .length = (size_t)-1};
    minisock *stranger = (minisock *)large;
    int room = 0;

    FAILS(EINVAL, msk_kind(NULL));
    FAILS(EINVAL, msk_room(msk, -1));
    FAILS(EINVAL, msk_room(msk, 1000));
    FAILS(EINVAL, msk_get_input(msk, 0, NULL));
    FAILS(EINVAL, msk_get_want(msk, 1000, (msk_want *)large));
    FAILS(EINVAL, msk_setucont(fd, msk, 0, (char *)&ucont, sizeof ucont - 1));
    FAILS(EINVAL, msk_setucont(fd, msk, 0, NULL, sizeof ucont));
    FAILS(EINVAL, msk_setucont(fd, msk, 0, (char *)&ucont, (size_t)-1));
    FAILS(EINVAL, msk_setucont(fd, msk, -1, (char *)&ucont, sizeof ucont));
    memcpy(large, &ucont, sizeof ucont);
    FAILS(EINVAL, msk_setucont(fd, msk, 0, large, sizeof large));
    FAILS(EINVAL, msk_setucont(fd, stranger, 0, (char *)&ucont, sizeof ucont));
    FAILS(EBADF, msk_setucont(-1, msk, 0, (char *)&ucont, sizeof ucont));
    ucont.start = 3;
    FAILS(EINVAL, msk_setucont(fd, msk, 0, (char *)&ucont, sizeof ucont));
    FAILS(EINVAL, msk_send(fd, msk, NULL, 3));
    FAILS(EINVAL, msk_sendv(fd, msk, &vec, 1));
    FAILS(EINVAL, msk_sendv(fd, msk, NULL, 1));
    FAILS(EINVAL, msk_sendv(fd, msk, &vec, -1));
    FAILS(EINVAL, msk_send(fd, stranger, (char *)"ok", 2));
    FAILS(EINVAL, msk_drop(fd, NULL));
    FAILS(EINVAL, msk_end(fd, stranger, 0, 1, 2));
    FAILS(EINVAL, msk_reset(fd, NULL, 0, 1, 2));
    FAILS(ENOSPC, msk_extract_events(fd, twice, 2, &event, &room));
    FAILS(EINVAL, msk_extract_events(fd, twice, 2, &event, NULL));

    /* An event moves away once only, and comes back as another minisocket. */
    msk_collection events[2];
    room = 2;
    FAILS(EINVAL, msk_extract_events(fd, twice, 2, events, &room));
    CHECK(room == 1);
    FAILS(EINVAL, msk_send(fd, msk, (char *)"ok", 2));
    FAILS(EBADMSG, msk_install_events(fd, &(msk_collection){(void *)"forged", 6}, 1));
    CHECK(msk_install_events(fd, events, 1) == 0);
    free(events[0].data);
}

static void finish(int fd, minisock *msk)
{
    msk_ucont ucont = {.kind = MSK_OUTPUT, .request = 1, .start = 0, .end = 2};
    tiovec vec = {.pkt = 0, .request = 1, .offset = 0, .data = "ok", .length = 2};
    CHECK(msk_setucont(fd, msk, 0, (char *)&ucont, sizeof ucont) == 0);
    CHECK(msk_end(fd, msk, 0, 1, 2) == 0);
    CHECK(msk_sendv(fd, msk, &vec, 1) == 2);
    FAILS(EINVAL, msk_sendv(fd, msk, &vec, 1));
    FAILS(EINVAL, msk_send(fd, msk, (char *)"ok", 2));
    FAILS(EINVAL, msk_drop(fd, msk));
    FAILS(EINVAL, msk_detach(fd, msk));
}

int main(int argc, char **argv)
{
    minisock *events[8];
    char address[64];
    int fd, status, misused = 0;
    pid_t child;

    CHECK(argc == 2);
    FAILS(EINVAL, msk_listen(NULL, argv[1], 0));
    FAILS(ENOENT, msk_listen("127.0.0.1:0", "/nowhere/keys", 0));
    fd = msk_listen("127.0.0.1:0", argv[1], 0);
    CHECK(fd >= 0);
    FAILS(EINVAL, msk_events(fd, events, 0, 0));
    FAILS(EINVAL, msk_events(fd, NULL, 8, 0));
    FAILS(EBADF, msk_events(-1, events, 8, 0));
    FAILS(EBADF, msk_port(0));
    snprintf(address, sizeof address, "127.0.0.1:%d", msk_port(fd));
    child = fork();
    CHECK(child >= 0);
    if (child == 0)
        ask(address);
    /* The child ends once it is answered; what is lost in between is asked for again. */
    while (waitpid(child, &status, WNOHANG) == 0) {
        int count = msk_events(fd, events, 8, 100);
        CHECK(count >= 0);
        for (int n = 0; n < count; n++) {
            msk_input input;
            if (msk_kind(events[n]) == MSK_CLOSE || msk_get_input(events[n], 0, &input) != 0)
                CHECK(msk_drop(fd, events[n]) == 0);
            else if (misused++ == 0)
                answer(fd, events[n]);
            else
                finish(fd, events[n]);
        }
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(misused > 1);
    CHECK(msk_close(fd) == 0);
    FAILS(EBADF, msk_close(fd));
    FAILS(EBADF, msk_events(fd, events, 8, 0));
    return 0;
}
