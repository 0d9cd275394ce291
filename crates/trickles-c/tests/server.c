/* A server without memory: input is a number n in decimal, output are n bytes, byte i being 7 * i + i / 256. It serves
 * two descriptors at one address, and hands every fifth event of the first to the second. Ends with its standard input. */
#include "tidegate_trickles.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            perror(#condition); \
            exit(1); \
        } \
    } while (0)

static unsigned char content[1 << 16];

static void fill(uint64_t offset, size_t length)
{
    for (size_t i = 0; i < length; i++)
        content[i] = (unsigned char)(7 * (offset + i) + (offset + i) / 256);
}

/* The number in the input becomes the end of an output continuation; the first bytes go out at once. */
static void answer_input(int fd, minisock *msk, const msk_input *input)
{
    struct {
        msk_ucont head;
        char opaque[4];
    } ucont = {.opaque = "abc"};
    tiovec vec[64];
    char text[32] = {0};
    int packets = msk_packets(msk), used = 0;
    uint64_t offset = 0, end;
    memcpy(text, input->data, input->length < 31 ? input->length : 31);
    end = strtoull(text, NULL, 10);
    CHECK(end <= sizeof content || packets <= 64);
    if (end == 13) {
        CHECK(msk_reset(fd, msk, 0, input->request, 113) == 0);
        CHECK(msk_sendv(fd, msk, NULL, 0) == 0);
        return;
    }
    ucont.head = (msk_ucont){.kind = MSK_OUTPUT, .request = input->request, .start = 0, .end = end};
    CHECK(msk_setucont(fd, msk, 0, (char *)&ucont, sizeof ucont.head + sizeof ucont.opaque) == 0);
    CHECK(msk_end(fd, msk, 0, input->request, end) == 0);
    for (int pkt = 0; pkt < packets && pkt < 64 && offset < end; pkt++) {
        size_t room = (size_t)msk_room(msk, pkt);
        size_t length = end - offset < room ? end - offset : room;
        vec[used++] = (tiovec){.pkt = pkt, .request = input->request, .offset = offset, .data = content + offset,
                               .length = length};
        offset += length;
    }
    fill(0, offset);
    CHECK(msk_sendv(fd, msk, vec, used) == (int)offset);
}

static void answer_wants(int fd, minisock *msk)
{
    static char bytes[1 << 17];
    size_t length = 0;
    msk_want want;
    for (int n = 0; msk_get_want(msk, n, &want) == 0; n++) {
        size_t room = (size_t)msk_room(msk, n);
        size_t part = want.length < room ? want.length : room;
        CHECK(want.opaque_length == 4 && memcmp(want.opaque, "abc", 4) == 0);
        if (part < want.length) {
            /* The client wants more than fits: the rest of the wants waits. */
            fill(want.offset, part);
            memcpy(bytes + length, content, part);
            length += part;
            break;
        }
        fill(want.offset, part);
        memcpy(bytes + length, content, part);
        length += part;
    }
    CHECK(msk_send(fd, msk, bytes, length) == (int)length);
}

int main(int argc, char **argv)
{
    static int counter;
    char address[64];
    int fds[2];
    CHECK(argc == 2);
    CHECK(msk_listen("nonsense", argv[1], 0) == -1);
    fds[0] = msk_listen("127.0.0.1:0", argv[1], MSK_SHARED);
    CHECK(fds[0] >= 0);
    snprintf(address, sizeof address, "127.0.0.1:%d", msk_port(fds[0]));
    fds[1] = msk_listen(address, argv[1], MSK_SHARED);
    CHECK(fds[1] >= 0);
    printf("%d\n", msk_port(fds[0]));
    fflush(stdout);
    for (;;) {
        struct pollfd polled[] = {{fds[0], POLLIN, 0}, {fds[1], POLLIN, 0}, {0, POLLIN, 0}};
        CHECK(poll(polled, 3, -1) >= 0);
        if (polled[2].revents)
            break;
        for (int n = 0; n < 2; n++) {
            minisock *events[16];
            int count = msk_events(fds[n], events, 16, 0);
            CHECK(count >= 0);
            for (int event = 0; event < count; event++) {
                msk_input input;
                if (n == 0 && ++counter % 5 == 0) {
                    extract_mskdesc_in in = {events[event]};
                    msk_collection moved;
                    int moved_count = 1;
                    CHECK(msk_extract_events(fds[0], &in, 1, &moved, &moved_count) == 0 && moved_count == 1);
                    CHECK(msk_install_events(fds[1], &moved, 1) == 0);
                    ((char *)moved.data)[0] ^= 1;
                    CHECK(msk_install_events(fds[1], &moved, 1) == -1);
                    free(moved.data);
                } else if (msk_kind(events[event]) == MSK_CLOSE) {
                    CHECK(msk_drop(fds[n], events[event]) == 0);
                } else if (msk_get_input(events[event], 0, &input) == 0) {
                    answer_input(fds[n], events[event], &input);
                } else {
                    answer_wants(fds[n], events[event]);
                }
            }
        }
        /* What was installed has no descriptor to wake poll. */
        minisock *events[16];
        int count;
        while ((count = msk_events(fds[1], events, 16, 0)) > 0)
            for (int event = 0; event < count; event++) {
                msk_input input;
                if (msk_get_input(events[event], 0, &input) == 0)
                    answer_input(fds[1], events[event], &input);
                else
                    answer_wants(fds[1], events[event]);
            }
    }
    CHECK(msk_close(fds[0]) == 0 && msk_close(fds[1]) == 0 && msk_close(fds[0]) == -1);
    return 0;
}
