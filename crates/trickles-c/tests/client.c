/* Asks argv[1] for argv[2] and writes what comes. */
#include "tidegate_trickles.h"

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
    static char bytes[1 << 22];
    int fd = argc == 3 ? msk_connect(argv[1]) : -1;
    if (fd < 0 || msk_request(fd, argv[2], (int)strlen(argv[2]), sizeof bytes) < 0) {
        perror("msk_request");
        return 1;
    }
    int length = msk_response(fd, bytes, sizeof bytes);
    fwrite(bytes, 1, (size_t)length, stdout);
    return msk_close(fd) == 0 ? 0 : 1;
}
