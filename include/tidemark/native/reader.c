/* Copies messages of librdkafka into the buffers of Arrow columns. See kafka/compiled.py, which calls these functions.
 *
 * Allocates nothing. librdkafka's functions are passed as pointers, and only its public message struct is read, so this file
 * compiles without librdkafka's headers and library.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { NO_HEADERS = -156 /* RD_KAFKA_RESP_ERR__NOENT */, HEADER_BYTES = 64 /* what an empty header takes, about */ };

/* As librdkafka's public rd_kafka_message_t. */
struct message {
    int error;
    void *topic;
    int32_t partition;
    void *value;
    size_t value_size;
    void *key;
    size_t key_size;
    int64_t offset;
    void *internal;
};

/* The librdkafka functions in use, without the prefix "rd_kafka_". */
struct client {
    void (*message_destroy)(struct message *);
    int64_t (*message_timestamp)(const struct message *, int *type);
    int32_t (*message_leader_epoch)(const struct message *);
    int (*message_headers)(const struct message *, void **headers);
    int (*header_get_all)(const void *headers, size_t index, const char **name, const void **value, size_t *size);
    const char *(*topic_name)(const void *topic);
};

/* The result of `sort`. */
struct sorted {
    int64_t records; /* left at the front */
    int64_t errors;
    int64_t last; /* offset of the last record, kept or not; -1: none */
    int64_t leader_epoch; /* of the last kept record; -1: unknown */
    int64_t bytes;
};

/* How many bytes and headers a chunk needs. */
struct sizes {
    int64_t keys, values, headers, header_names, header_values;
};

/* A column of Arrow's type binary or string. */
struct binary {
    uint8_t *valid;
    int32_t *ends; /* the first is 0, then one for each value */
    uint8_t *bytes;
    int64_t nulls;
};

struct columns {
    int64_t *offset;
    int64_t *millis; /* -1: no timestamp */
    struct binary key, value;
    const uint8_t *with_headers; /* as measured: validity of the list of headers */
    int32_t *header_ends;
    int64_t without_headers;
    struct binary header_name, header_value;
};

static void set_bit(uint8_t *bits, int64_t at) { bits[at >> 3] |= (uint8_t)(1u << (at & 7)); }
static int has_bit(const uint8_t *bits, int64_t at) { return bits[at >> 3] >> (at & 7) & 1; }
static void clear_bits(uint8_t *bits, int64_t count) { memset(bits, 0, (size_t)(count + 7) / 8); }

/* Whether Python would decode the text: no overlong forms, no surrogates, nothing beyond U+10FFFF. */
static int is_utf8(const char *text) {
    const uint8_t *at = (const uint8_t *)text;
    while (*at) {
        uint8_t first = *at++;
        if (first < 0x80)
            continue;
        int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
        if (first < 0xC2 || first > 0xF4)
            return 0;
        uint8_t low = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80; /* of the second byte */
        uint8_t high = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        for (; more; more--, at++, low = 0x80, high = 0xBF) /* the final zero is below `low` */
            if (*at < low || *at > high)
                return 0;
    }
    return 1;
}

static void put(struct binary *column, int64_t at, const void *data, size_t size) {
    int32_t end = column->ends[at];
    if (data) {
        memcpy(column->bytes + end, data, size);
        set_bit(column->valid, at);
        end += (int32_t)size;
    } else {
        column->nulls++;
    }
    column->ends[at + 1] = end;
}

/* Moves records of the partition below `end` to the front and errors to `errors`, and destroys the rest, such as late messages of the
 * partition that the client read before. An error without a topic comes from the client itself. */
void tidemark_sort(const struct client *client, struct message **messages, struct message **errors, int64_t count, const char *topic,
                   int32_t partition, int64_t end, struct sorted *found) {
    const void *known = NULL;
    *found = (struct sorted){.last = -1, .leader_epoch = -1};
    for (int64_t at = 0; at < count; at++) {
        struct message *message = messages[at];
        messages[at] = NULL;
        if (message->topic && message->topic != known && strcmp(client->topic_name(message->topic), topic) == 0)
            known = message->topic;
        if (message->topic && (message->topic != known || message->partition != partition)) {
            client->message_destroy(message);
            continue;
        }
        if (message->error) {
            errors[found->errors++] = message;
            continue;
        }
        found->last = message->offset;
        if (message->offset >= end) {
            client->message_destroy(message);
            continue;
        }
        messages[found->records++] = message;
        found->bytes += (int64_t)(message->key_size + message->value_size);
    }
    if (found->records)
        found->leader_epoch = client->message_leader_epoch(messages[found->records - 1]);
}

/* Returns how many messages, at least one, fit into `limit` bytes, and measures the space that their chunk needs.
 * Sets the bits of messages with headers, and of those with a header name that is not UTF-8, whose headers are omitted. Looking for
 * headers is slow in librdkafka, so the bits save the second look. */
int64_t tidemark_measure(const struct client *client, struct message **messages, int64_t count, int64_t limit, struct sizes *sizes,
                         uint8_t *with_headers, uint8_t *unreadable) {
    *sizes = (struct sizes){0};
    clear_bits(with_headers, count);
    clear_bits(unreadable, count);
    int64_t at = 0, bytes = 0;
    for (; at < count; at++) {
        struct message *message = messages[at];
        void *headers;
        int64_t number = 0, names = 0, values = 0;
        int broken = 0;
        int answer = client->message_headers(message, &headers);
        if (answer != 0 && answer != NO_HEADERS)
            broken = 1; /* such as more headers than librdkafka reads */
        if (answer == 0) {
            const char *name;
            const void *value;
            size_t size;
            for (; client->header_get_all(headers, (size_t)number, &name, &value, &size) == 0; number++) {
                if (!is_utf8(name)) {
                    broken = 1;
                    number = names = values = 0;
                    break;
                }
                names += (int64_t)strlen(name);
                values += value ? (int64_t)size : 0;
            }
        }
        bytes += (int64_t)(message->key_size + message->value_size) + names + values + number * HEADER_BYTES;
        if (at && bytes > limit)
            break;
        if (broken)
            set_bit(unreadable, at);
        if (number)
            set_bit(with_headers, at);
        sizes->keys += message->key ? (int64_t)message->key_size : 0;
        sizes->values += message->value ? (int64_t)message->value_size : 0;
        sizes->headers += number;
        sizes->header_names += names;
        sizes->header_values += values;
    }
    return at;
}

/* Fills the columns with the measured messages, and destroys these. */
void tidemark_copy(const struct client *client, struct message **messages, int64_t count, const struct sizes *sizes,
                   struct columns *to) {
    clear_bits(to->key.valid, count);
    clear_bits(to->value.valid, count);
    clear_bits(to->header_name.valid, sizes->headers);
    clear_bits(to->header_value.valid, sizes->headers);
    to->key.ends[0] = to->value.ends[0] = to->header_ends[0] = to->header_name.ends[0] = to->header_value.ends[0] = 0;
    to->key.nulls = to->value.nulls = to->header_name.nulls = to->header_value.nulls = to->without_headers = 0;
    int32_t header = 0;
    for (int64_t at = 0; at < count; at++) {
        struct message *message = messages[at];
        int type;
        int64_t millis = client->message_timestamp(message, &type);
        to->offset[at] = message->offset;
        to->millis[at] = type ? millis : -1; /* 0: not available */
        put(&to->key, at, message->key, message->key_size);
        put(&to->value, at, message->value, message->value_size);
        void *headers;
        if (has_bit(to->with_headers, at) && client->message_headers(message, &headers) == 0) {
            const char *name;
            const void *value;
            size_t size;
            for (size_t number = 0; client->header_get_all(headers, number, &name, &value, &size) == 0; number++, header++) {
                put(&to->header_name, header, name, strlen(name));
                put(&to->header_value, header, value, size);
            }
        }
        to->without_headers += header == to->header_ends[at];
        to->header_ends[at + 1] = header;
        messages[at] = NULL;
        client->message_destroy(message);
    }
}

/* Destroys the remaining messages. */
void tidemark_discard(const struct client *client, struct message **messages, int64_t count) {
    for (int64_t at = 0; at < count; at++) {
        struct message *message = messages[at];
        messages[at] = NULL;
        if (message)
            client->message_destroy(message);
    }
}
