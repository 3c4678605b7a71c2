/* What the sink answers about objects and uploads. Part of sink.c. */

static int bucket_length(const struct request *request) { return (int)strcspn(request->name, "/"); }

static void xml_object(FILE *xml, const struct object *object) {
    char at[32];
    struct tm when;
    strftime(at, sizeof at, "%Y-%m-%dT%H:%M:%S.000Z", gmtime_r(&object->at, &when));
    fprintf(xml, "<Contents><Key>%s</Key><LastModified>%s</LastModified><ETag>\"%032lx-1\"</ETag><Size>%ld</Size>"
                 "<StorageClass>STANDARD</StorageClass></Contents>",
            key_of(object->name), at, (unsigned long)object->tag, object->size);
}

/* Everything in one answer: names between prefix and delimiter once, as S3 does; no continuation. */
static bool list_objects(struct request *request) {
    char prefix[LINE_BYTES] = "", delimiter[LINE_BYTES] = "", name[2 * LINE_BYTES], folder[LINE_BYTES] = "", *out;
    size_t size;
    int count = 0;
    asked(request, "prefix", prefix);
    asked(request, "delimiter", delimiter);
    size_t skipped = (size_t)sprintf(name, "%.*s/%s", bucket_length(request), request->name, prefix);
    FILE *xml = open_memstream(&out, &size);
    fprintf(xml, "<?xml version=\"1.0\"?><ListBucketResult><Prefix>%s</Prefix><MaxKeys>1000</MaxKeys>", prefix);
    fprintf(xml, "<IsTruncated>false</IsTruncated>");
    pthread_mutex_lock(&tables);
    for (int i = table_at(&objects, name); i < objects.count && !strncmp(objects.items[i]->name, name, skipped); i++) {
        const char *rest = objects.items[i]->name + skipped, *end = *delimiter ? strstr(rest, delimiter) : NULL;
        if (!end) {
            xml_object(xml, objects.items[i]);
        } else if (!*folder || strncmp(folder, rest, strlen(folder))) {
            sprintf(folder, "%.*s", (int)(end - rest + (long)strlen(delimiter)), rest);
            fprintf(xml, "<CommonPrefixes><Prefix>%s%s</Prefix></CommonPrefixes>", prefix, folder);
        } else {
            continue;
        }
        count++;
    }
    pthread_mutex_unlock(&tables);
    fprintf(xml, "<KeyCount>%d</KeyCount></ListBucketResult>", count);
    fclose(xml);
    bool is_sent = answer(request, "200 OK", "", out);
    free(out);
    return is_sent;
}

static bool list_uploads(struct request *request) {
    char prefix[LINE_BYTES] = "", *out;
    size_t size;
    asked(request, "prefix", prefix);
    FILE *xml = open_memstream(&out, &size);
    fprintf(xml, "<?xml version=\"1.0\"?><ListMultipartUploadsResult><IsTruncated>false</IsTruncated>");
    pthread_mutex_lock(&tables);
    for (int i = 0; i < uploads.count; i++) {
        const char *key = key_of(uploads.items[i]->name);
        if (!strncmp(key, prefix, strlen(prefix)))
            fprintf(xml, "<Upload><Key>%s</Key><UploadId>%ld</UploadId></Upload>", key, uploads.items[i]->id);
    }
    pthread_mutex_unlock(&tables);
    fprintf(xml, "</ListMultipartUploadsResult>");
    fclose(xml);
    bool is_sent = answer(request, "200 OK", "", out);
    free(out);
    return is_sent;
}

static bool list_parts(struct request *request) {
    char *out;
    size_t size;
    FILE *xml = open_memstream(&out, &size);
    fprintf(xml, "<?xml version=\"1.0\"?><ListPartsResult><IsTruncated>false</IsTruncated>");
    pthread_mutex_lock(&tables);
    struct object *upload = upload_find(request->name, asked_number(request, "uploadId"));
    for (int i = 0; upload && i < upload->count; i++)
        fprintf(xml, "<Part><PartNumber>%d</PartNumber><ETag>\"%032lx-1\"</ETag><Size>%ld</Size></Part>",
                upload->parts[i].number, (unsigned long)upload->parts[i].tag, upload->parts[i].size);
    pthread_mutex_unlock(&tables);
    fprintf(xml, "</ListPartsResult>");
    fclose(xml);
    bool is_sent = upload ? answer(request, "200 OK", "", out) : refuse(request, "404 Not Found", "NoSuchUpload");
    free(out);
    return is_sent;
}

static bool create_upload(struct request *request) {
    char xml[2 * LINE_BYTES];
    pthread_mutex_lock(&tables);
    struct object *upload = object_new(request->name);
    table_insert(&uploads, upload);
    sprintf(xml, "<?xml version=\"1.0\"?><InitiateMultipartUploadResult><Bucket>%.*s</Bucket><Key>%s</Key>"
                 "<UploadId>%ld</UploadId></InitiateMultipartUploadResult>",
            bucket_length(request), request->name, key_of(request->name), upload->id);
    pthread_mutex_unlock(&tables);
    return answer(request, "200 OK", "", xml);
}

static bool complete_upload(struct request *request) {
    char xml[2 * LINE_BYTES];
    pthread_mutex_lock(&tables);
    struct object *upload = upload_find(request->name, asked_number(request, "uploadId"));
    bool is_there = upload && table_find(&objects, upload->name) && header(request, "if-none-match");
    if (upload && !is_there) {
        table_remove(&uploads, upload);
        upload->tag = new_tag();
        object_publish(upload, false);
        sprintf(xml, "<?xml version=\"1.0\"?><CompleteMultipartUploadResult><Key>%s</Key><ETag>\"%032lx-1\"</ETag>"
                     "</CompleteMultipartUploadResult>",
                key_of(upload->name), (unsigned long)upload->tag);
    }
    pthread_mutex_unlock(&tables);
    if (is_there) return refuse(request, "412 Precondition Failed", "PreconditionFailed");
    return upload ? answer(request, "200 OK", "", xml) : refuse(request, "404 Not Found", "NoSuchUpload");
}

static bool delete_objects(struct request *request) {
    char name[2 * LINE_BYTES];
    if (!request->body.memory) return refuse(request, "400 Bad Request", "MalformedXML");
    pthread_mutex_lock(&tables);
    for (const char *at = request->body.memory; (at = strstr(at, "<Key>")); at += 5) {
        int length = (int)strcspn(at + 5, "<");
        snprintf(name, sizeof name, "%.*s/%.*s", bucket_length(request), request->name, length, at + 5);
        object_delete(table_find(&objects, name));
    }
    pthread_mutex_unlock(&tables);
    return answer(request, "200 OK", "", "<?xml version=\"1.0\"?><DeleteResult></DeleteResult>");
}

/* Finds the bytes that are asked for; false: none of them is there. */
static bool find_range(const struct request *request, const struct object *object, long *offset, long *size) {
    const char *range = header(request, "range");
    long number = asked_number(request, "partNumber"), last;
    *offset = 0, *size = object->size;
    if (number) {
        if (number > object->count) return false;
        for (int i = 0; i < number - 1; i++) *offset += object->parts[i].size;
        *size = object->parts[number - 1].size;
    } else if (range && sscanf(range, "bytes=-%ld", &last) == 1) {
        *size = SMALLER(last, object->size);
        *offset = object->size - *size;
    } else if (range && sscanf(range, "bytes=%ld-%ld", offset, &last) == 2) {
        *size = SMALLER(last + 1, object->size) - *offset;
    } else if (range) {
        *size = object->size - *offset;
    }
    return *size > 0 || !(range || number);
}

static bool send_object(struct request *request, const struct object *object) {
    char headers[1024], at[64];
    struct tm when;
    long offset, size;
    bool is_partial = header(request, "range") || asked(request, "partNumber", NULL);
    if (!find_range(request, object, &offset, &size)) return refuse(request, "416 Range Not Satisfiable", "InvalidRange");
    strftime(at, sizeof at, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&object->at, &when));
    int length = sprintf(headers, "Content-Length: %ld\r\nContent-Type: application/octet-stream\r\nAccept-Ranges: bytes\r\n"
                                  "Last-Modified: %s\r\nETag: \"%032lx-1\"\r\n",
                         size, at, (unsigned long)object->tag);
    if (asked(request, "partNumber", NULL)) length += sprintf(headers + length, "x-amz-mp-parts-count: %d\r\n", object->count);
    if (is_partial) sprintf(headers + length, "Content-Range: bytes %ld-%ld/%ld\r\n", offset, offset + size - 1, object->size);
    if (!answer(request, is_partial ? "206 Partial Content" : "200 OK", headers, "")) return false;
    return !strcmp(request->method, "HEAD") || object_send(request->wire, object, offset, size);
}

static bool get_object(struct request *request) {
    char tag[64] = "";
    const char *wanted = header(request, "if-match");
    pthread_mutex_lock(&tables);
    struct object *object = table_find(&objects, request->name);
    if (object) object->holders++, sprintf(tag, "\"%032lx-1\"", (unsigned long)object->tag); /* it may be replaced meanwhile */
    pthread_mutex_unlock(&tables);
    if (!object) return refuse(request, "404 Not Found", "NoSuchKey");
    bool is_other = wanted && strncmp(wanted, tag, strlen(tag));
    bool is_sent = is_other ? refuse(request, "412 Precondition Failed", "PreconditionFailed") : send_object(request, object);
    pthread_mutex_lock(&tables);
    object_release(object);
    pthread_mutex_unlock(&tables);
    return is_sent;
}
