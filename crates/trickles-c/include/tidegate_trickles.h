/* Trickles servers in C: the minisocket calls of Figure 8 of "Trickles: A Stateless Network Stack for Improved
 * Scalability, Resilience, and Flexibility" (NSDI 2005), and what it takes to use them.
 *
 * A descriptor from msk_listen is a UDP socket; wait for it with poll(2) or let msk_events wait. Each event is a
 * minisocket: one packet of one client, and the packets that may be sent in answer to it. It ends with msk_send,
 * msk_sendv, msk_sendfilev, msk_sendbulk or msk_drop and must not be used afterwards. One thread at a time uses a
 * descriptor and its minisockets; descriptors of several threads share an address with MSK_SHARED.
 *
 * Calls return -1 and set errno: EBADF no such descriptor, EINVAL a wrong argument, ENOSPC no room left in the packets,
 * EBADMSG an extracted event that no replica made, EAGAIN nothing to do, or the system's own. A minisocket that has ended
 * is EINVAL to all calls that take a descriptor with it. */
#ifndef TIDEGATE_TRICKLES_H
#define TIDEGATE_TRICKLES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct minisock minisock;

enum { MSK_OPEN = 1, MSK_REQUEST = 2, MSK_CLOSE = 3 };
enum { MSK_SHARED = 1 };
enum { MSK_OUTPUT = 1, MSK_INPUT = 2 };

/* Output that the client asks for: the n-th goes into packet n. */
typedef struct {
    uint32_t request;
    uint32_t length;      /* at most; 0 at valid_end asks what follows */
    uint64_t offset;
    uint64_t valid_start; /* of the output continuation that it came with */
    uint64_t valid_end;
    const void *opaque;   /* the application's bytes in it; valid until the minisocket ends */
    size_t opaque_length;
} msk_want;

/* Input of a request. */
typedef struct {
    uint32_t request;
    uint32_t last;        /* not 0: the input ends with data */
    uint64_t consumed;    /* by the input continuation; data begins there */
    const void *data;
    size_t length;
    const void *opaque;
    size_t opaque_length;
} msk_input;

/* Bytes for a packet. */
typedef struct {
    int pkt;
    uint32_t request;
    uint64_t offset;      /* in the request's output */
    const void *data;
    size_t length;
} tiovec;

/* Bytes of a file for a packet. */
typedef struct {
    int pkt;
    uint32_t request;
    uint64_t offset;
    int file;
    uint64_t file_offset;
    size_t length;
} fiovec;

/* What msk_setucont takes as buf: this, followed by the application's own bytes. */
typedef struct {
    uint32_t kind;        /* MSK_OUTPUT or MSK_INPUT */
    uint32_t request;
    uint64_t start;       /* MSK_OUTPUT: validStart; MSK_INPUT: input consumed */
    uint64_t end;         /* MSK_OUTPUT: validEnd; MSK_INPUT: ignored */
} msk_ucont;

/* One element of msk_sendbulk. */
typedef struct {
    minisock *msk;
    const tiovec *vec;
    int count;
} mskdesc;

/* An event to extract. */
typedef struct {
    minisock *msk;
} extract_mskdesc_in;

/* An extracted event: bytes that any replica installs. The caller frees data with free(3). */
typedef struct {
    void *data;
    size_t length;
} msk_collection;

/* Listens at "ADDRESS:PORT" with the keys of a key file; returns a descriptor. */
int msk_listen(const char *address, const char *key_file, int flags);
/* The port of a descriptor. */
int msk_port(int fd);
/* Ends a descriptor. Its minisockets must have ended. */
int msk_close(int fd);
/* Stores up to max events, after waiting for timeout_ms (-1: for ever) for the first; returns how many. */
int msk_events(int fd, minisock **events, int max, int timeout_ms);

int msk_kind(const minisock *msk);
/* Packets that may be sent. */
int msk_packets(const minisock *msk);
/* Bytes of output that packet pkt still takes. */
int msk_room(const minisock *msk, int pkt);
/* The n-th input or want; 0, or -1 where there is none. */
int msk_get_input(const minisock *msk, int n, msk_input *input);
int msk_get_want(const minisock *msk, int n, msk_want *want);

/* Figure 8. */
/* Fills the wants in their order with len bytes at buf, sends all packets and ends the minisocket; returns the bytes
 * that were taken. */
int msk_send(int fd, minisock *msk, char *buf, size_t len);
int msk_sendv(int fd, minisock *msk, const tiovec *vec, int count);
int msk_sendfilev(int fd, minisock *msk, const fiovec *vec, int count);
int msk_setucont(int fd, minisock *msk, int pkt, char *buf, size_t len);
int msk_sendbulk(int fd, mskdesc *descs, int len);
/* Answers with nothing: the trickle ends, as if the packet had been lost. */
int msk_drop(int fd, minisock *msk);
/* Keeps the minisocket beyond the next msk_events; without it, an event that was not answered by then is dropped. */
int msk_detach(int fd, minisock *msk);
/* Ends the minisockets and stores an event for each; *outlen is the room of out, and then how many there are, after an
 * error too. */
int msk_extract_events(int fd, extract_mskdesc_in *in, int inlen, msk_collection *out, int *outlen);
/* The next msk_events brings them. */
int msk_install_events(int fd, msk_collection *events, int count);
/* Says where a request's output ends, or that it failed: in packet pkt, before the minisocket ends. */
int msk_end(int fd, minisock *msk, int pkt, uint32_t request, uint64_t length);
int msk_reset(int fd, minisock *msk, int pkt, uint32_t request, uint16_t code);

/* Clients. msk_request sends req as the whole input of a request to the server of msk_connect and receives up to
 * reservelen bytes of its output, which msk_response then copies out; returns how many there are. */
int msk_connect(const char *address);
int msk_request(int fd, char *req, int reqlen, int reservelen);
int msk_response(int fd, void *buf, size_t len);

#ifdef __cplusplus
}
#endif

#endif
