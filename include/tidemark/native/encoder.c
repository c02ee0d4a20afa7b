/* Encodes Arrow columns as rows of Postgres' binary COPY. See sink/compiled_rows.py, which calls encode.
 *
 * Allocates nothing. Values have the form of the types' send functions in Postgres: `array_send`, `numeric_send` and so on.
 */
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Arrow's decimals are read as little endian: Python encodes on other machines"
#endif

/* As in Arrow's C data interface. */
struct array {
    int64_t length, null_count, offset, n_buffers, n_children;
    const void **buffers;
    struct array **children;
    struct array *dictionary;
    void (*release)(struct array *);
    void *private_data;
};

enum kind { BOOLEAN, BYTES_2, BYTES_4, BYTES_8, BYTES_16, BINARY, JSONB, DATE, TIMESTAMP, INTERVAL, DECIMAL, NUMBER };

struct type {
    int32_t kind;
    int32_t width;     /* DECIMAL: bytes of a value in Arrow */
    int32_t precision; /* NUMBER, a number in text: of the column; -1: no limits */
    int32_t scale;     /* DECIMAL: of the values; NUMBER: of the column */
    uint32_t element;  /* the OID of the elements, if the values are lists; otherwise 0 */
};

enum status { ENCODED, FULL, UNFIT };

/* How far `encode` came. */
struct progress {
    int64_t rows;
    int64_t bytes;
    int64_t column; /* UNFIT: of the value that Postgres cannot store */
};

struct output {
    uint8_t *at, *end;
};

/* Days and microseconds from 1970, where Arrow begins to count, to 2000, where Postgres does. */
static const int32_t EPOCH_DAYS = 10957;
static const int64_t EPOCH_MICROS = INT64_C(946684800000000);

/* Postgres' numeric: base-10,000 digits, here called groups. */
enum { GROUP = 4, BASE = 10000, MOST_BEFORE = 131072, MOST_AFTER = 16383, NEGATIVE = 0x4000 };
enum { NOT_A_NUMBER = 0xC000, INFINITE = 0xD000, MINUS_INFINITE = 0xF000, MOST_GROUPS = 24 /* of 256 bits */ };
static const uint32_t TENS[GROUP + 1] = {1, 10, 100, 1000, 10000};

static int has_room(const struct output *out, int64_t size) { return out->end - out->at >= size; }
static int is_null(const struct array *values, int64_t at) {
    const uint8_t *valid = values->buffers[0];
    return valid && !(valid[at >> 3] >> (at & 7) & 1);
}

static void put_2(struct output *out, uint32_t value) {
    out->at[0] = (uint8_t)(value >> 8);
    out->at[1] = (uint8_t)value;
    out->at += 2;
}

static void put_4(struct output *out, uint32_t value) {
    put_2(out, value >> 16);
    put_2(out, value);
}

static void put_8(struct output *out, uint64_t value) {
    put_4(out, (uint32_t)(value >> 32));
    put_4(out, (uint32_t)value);
}

static enum status put_bytes(struct output *out, const uint8_t *from, int64_t size, int is_jsonb) {
    if (size + is_jsonb > INT32_MAX)
        return UNFIT;
    if (!has_room(out, 4 + is_jsonb + size))
        return FULL;
    put_4(out, (uint32_t)(size + is_jsonb));
    if (is_jsonb)
        *out->at++ = 1; /* the version of jsonb's form */
    if (size)
        memcpy(out->at, from, (size_t)size);
    out->at += size;
    return ENCODED;
}

static void put_numeric_head(struct output *out, int64_t groups, int64_t weight, uint32_t sign, int64_t scale) {
    put_4(out, (uint32_t)(8 + 2 * groups));
    put_2(out, (uint32_t)groups);
    put_2(out, (uint32_t)weight);
    put_2(out, sign);
    put_2(out, (uint32_t)scale);
}

/* Divides an integer of `*count` limbs, the lowest first, drops zero limbs at its end, and returns the remainder. */
static uint32_t divide(uint32_t *limbs, int *count, uint32_t divisor) {
    uint64_t remainder = 0;
    for (int at = *count - 1; at >= 0; at--) {
        remainder = remainder << 32 | limbs[at];
        limbs[at] = (uint32_t)(remainder / divisor);
        remainder %= divisor;
    }
    while (*count && !limbs[*count - 1])
        --*count;
    return (uint32_t)remainder;
}

static enum status put_decimal(struct output *out, const uint8_t *from, const struct type *type) {
    uint32_t limbs[8];
    uint16_t groups[MOST_GROUPS];
    int count = type->width / 4, first = MOST_GROUPS, last = MOST_GROUPS;
    memcpy(limbs, from, (size_t)type->width);
    uint32_t negative = limbs[count - 1] >> 31;
    uint64_t carry = negative;
    for (int at = 0; negative && at < count; at++) {
        carry += (uint32_t)~limbs[at];
        limbs[at] = (uint32_t)carry;
        carry >>= 32;
    }
    while (count && !limbs[count - 1])
        count--;
    int part = type->scale % GROUP; /* digits of a group that the point cuts */
    if (part)
        groups[--first] = (uint16_t)(divide(limbs, &count, TENS[part]) * TENS[GROUP - part]);
    while (count > 2)
        groups[--first] = (uint16_t)divide(limbs, &count, BASE);
    uint64_t undivided = count > 1 ? (uint64_t)limbs[1] << 32 | limbs[0] : count ? limbs[0] : 0;
    for (; undivided; undivided /= BASE)
        groups[--first] = (uint16_t)(undivided % BASE);
    while (first < last && !groups[first])
        first++;
    int weight = last - first - 1 - (type->scale + GROUP - 1) / GROUP;
    while (last > first && !groups[last - 1])
        last--;
    if (!has_room(out, 12 + 2 * (last - first)))
        return FULL;
    put_numeric_head(out, last - first, last > first ? weight : 0, negative && last > first ? NEGATIVE : 0, type->scale);
    for (; first < last; first++)
        put_2(out, groups[first]);
    return ENCODED;
}

static int is_digit(uint8_t byte) { return byte >= '0' && byte <= '9'; }

static int is_word(const uint8_t *text, int64_t size, const char *word) {
    if (size != (int64_t)strlen(word))
        return 0;
    for (int64_t at = 0; at < size; at++)
        if ((text[at] >= 'A' && text[at] <= 'Z' ? text[at] + ('a' - 'A') : text[at]) != word[at])
            return 0;
    return 1;
}

static enum status put_special(struct output *out, const uint8_t *word, int64_t size, int negative, int has_limits) {
    uint32_t sign = NOT_A_NUMBER;
    if (!is_word(word, size, "nan")) {
        if (has_limits || !(is_word(word, size, "inf") || is_word(word, size, "infinity")))
            return UNFIT;
        sign = negative ? MINUS_INFINITE : INFINITE;
    }
    if (!has_room(out, 12))
        return FULL;
    put_numeric_head(out, 0, 0, sign, 0);
    return ENCODED;
}

static int64_t floor_divided(int64_t value) { return value >= 0 ? value / GROUP : -((GROUP - 1 - value) / GROUP); }

/* A number in text: digits with a point and an exponent, NaN or Infinity. It fits if the column stores exactly this number. */
static enum status put_number(struct output *out, const uint8_t *text, int64_t size, const struct type *type) {
    const uint8_t *at = text, *end = text + size;
    int has_limits = type->precision >= 0, negative = at < end && *at == '-';
    at += at < end && (*at == '-' || *at == '+');
    if (at == end || !(is_digit(*at) || *at == '.'))
        return put_special(out, at, end - at, negative, has_limits);

    /* `first` and `last`: the significant digits; `low`: the power of ten of the last digit in the text; `place`: that of `last` */
    const uint8_t *first = NULL, *last = NULL, *point = NULL;
    int64_t before = 0, after = 0, digits = 0, zeros = 0;
    for (; at < end; at++) {
        if (*at == '.') {
            if (point)
                return UNFIT;
            point = at;
            continue;
        }
        if (!is_digit(*at))
            break;
        *(point ? &after : &before) += 1;
        if (*at != '0') {
            first = first ? first : at;
            last = at;
            zeros = 0;
        } else {
            zeros++;
        }
        digits += first != NULL;
    }
    if (before + after == 0)
        return UNFIT;
    int64_t exponent = 0;
    if (at < end) {
        if (*at++ != 'e' && at[-1] != 'E')
            return UNFIT;
        int is_small = at < end && *at == '-';
        at += at < end && (*at == '-' || *at == '+');
        if (at == end || end - at > 9)
            return UNFIT;
        for (; at < end; at++) {
            if (!is_digit(*at))
                return UNFIT;
            exponent = exponent * 10 + (*at - '0');
        }
        exponent = is_small ? -exponent : exponent;
    }
    int64_t low = exponent - after, shown = low < 0 ? -low : 0;
    if (!first) {
        if (shown > MOST_AFTER)
            return UNFIT;
        if (!has_room(out, 12))
            return FULL;
        put_numeric_head(out, 0, 0, 0, shown);
        return ENCODED;
    }
    int64_t high = low + digits - 1, place = low + zeros;
    if (has_limits ? place < -(int64_t)type->scale || high >= type->precision - type->scale : shown > MOST_AFTER || high >= MOST_BEFORE)
        return UNFIT;

    int64_t weight = floor_divided(high), count = weight - floor_divided(place) + 1;
    if (!has_room(out, 12 + 2 * count))
        return FULL;
    put_numeric_head(out, count, weight, negative ? NEGATIVE : 0, shown < MOST_AFTER ? shown : MOST_AFTER);
    uint32_t group = 0;
    int64_t left = high - weight * GROUP; /* digits of the group that follow */
    for (at = first; at <= last; at++) {
        if (*at == '.')
            continue;
        group = group * 10 + (uint32_t)(*at - '0');
        if (left-- == 0) {
            put_2(out, group);
            group = 0;
            left = GROUP - 1;
        }
    }
    if (left < GROUP - 1)
        put_2(out, group * TENS[left + 1]);
    return ENCODED;
}

static enum status put_value(struct output *out, const struct array *values, const struct type *type, int64_t at) {
    const uint8_t *data = values->buffers[1];
    uint16_t two;
    uint32_t four;
    uint64_t eight;
    switch ((enum kind)type->kind) {
    case BINARY:
    case JSONB:
    case NUMBER: {
        int32_t bounds[2];
        memcpy(bounds, data + 4 * at, sizeof bounds);
        const uint8_t *bytes = values->buffers[2] ? (const uint8_t *)values->buffers[2] + bounds[0] : data;
        int64_t size = (int64_t)bounds[1] - bounds[0];
        return type->kind == NUMBER ? put_number(out, bytes, size, type) : put_bytes(out, bytes, size, type->kind == JSONB);
    }
    case DECIMAL:
        return put_decimal(out, data + type->width * at, type);
    default:
        break;
    }
    if (!has_room(out, 4 + 16))
        return FULL;
    switch ((enum kind)type->kind) {
    case BOOLEAN:
        put_4(out, 1);
        *out->at++ = data[at >> 3] >> (at & 7) & 1;
        return ENCODED;
    case BYTES_2:
        memcpy(&two, data + 2 * at, sizeof two);
        put_4(out, 2);
        put_2(out, two);
        return ENCODED;
    case DATE:
    case BYTES_4:
        memcpy(&four, data + 4 * at, sizeof four);
        if (type->kind == DATE) {
            if ((int32_t)four <= INT32_MIN + EPOCH_DAYS) /* the lowest number means -infinity */
                return UNFIT;
            four -= (uint32_t)EPOCH_DAYS;
        }
        put_4(out, 4);
        put_4(out, four);
        return ENCODED;
    case TIMESTAMP:
    case BYTES_8:
        memcpy(&eight, data + 8 * at, sizeof eight);
        if (type->kind == TIMESTAMP) {
            if ((int64_t)eight <= INT64_MIN + EPOCH_MICROS)
                return UNFIT;
            eight -= (uint64_t)EPOCH_MICROS;
        }
        put_4(out, 8);
        put_8(out, eight);
        return ENCODED;
    case INTERVAL:
        memcpy(&eight, data + 8 * at, sizeof eight);
        put_4(out, 16);
        put_8(out, eight);
        put_8(out, 0); /* days and months */
        return ENCODED;
    default: /* BYTES_16 */
        put_4(out, 16);
        memcpy(out->at, data + 16 * at, 16);
        out->at += 16;
        return ENCODED;
    }
}

static enum status put_list(struct output *out, const struct array *lists, const struct type *type, int64_t at) {
    const struct array *items = lists->children[0];
    int32_t bounds[2];
    memcpy(bounds, (const uint8_t *)lists->buffers[1] + 4 * at, sizeof bounds);
    uint8_t *start = out->at;
    if (!has_room(out, 4 + 20))
        return FULL;
    int is_empty = bounds[0] == bounds[1];
    put_4(out, 12);
    put_4(out, !is_empty); /* dimensions */
    put_4(out, 0);         /* whether there are nulls */
    put_4(out, type->element);
    if (is_empty)
        return ENCODED;
    put_4(out, (uint32_t)(bounds[1] - bounds[0]));
    put_4(out, 1); /* index of the first element */
    for (int64_t item = items->offset + bounds[0]; item < items->offset + bounds[1]; item++) {
        if (is_null(items, item)) {
            if (!has_room(out, 4))
                return FULL;
            put_4(out, UINT32_MAX);
            start[11] = 1;
            continue;
        }
        enum status status = put_value(out, items, type, item);
        if (status != ENCODED)
            return status;
    }
    int64_t size = out->at - start - 4;
    if (size > INT32_MAX)
        return UNFIT;
    put_4(&(struct output){start, out->end}, (uint32_t)size);
    return ENCODED;
}

/* Encodes rows `first` to `end` of the record batch, as many as `size` bytes hold. */
enum status tidemark_encode(const struct array *batch, const struct type *types, int64_t first, int64_t end, uint8_t *bytes, int64_t size,
                            struct progress *progress) {
    struct output out = {bytes, bytes + size};
    *progress = (struct progress){0};
    for (int64_t row = batch->offset + first; row < batch->offset + end; row++) {
        if (!has_room(&out, 2))
            return FULL;
        put_2(&out, (uint32_t)batch->n_children);
        for (int64_t column = 0; column < batch->n_children; column++) {
            const struct array *values = batch->children[column];
            int64_t at = values->offset + row;
            enum status status = ENCODED;
            if (!is_null(values, at))
                status = types[column].element ? put_list(&out, values, &types[column], at) : put_value(&out, values, &types[column], at);
            else if (!has_room(&out, 4))
                status = FULL;
            else
                put_4(&out, UINT32_MAX);
            if (status != ENCODED) {
                progress->column = column;
                return status;
            }
        }
        progress->rows++;
        progress->bytes = out.at - bytes;
    }
    return ENCODED;
}
