#include <headport/headport.h>
#include <stdio.h>

int main(int count, char** arguments) {
  if (count != 2) return 2;
  headport_generator* generator = NULL;
  if (headport_open(arguments[1], NULL, &generator) != HEADPORT_OK) {
    fprintf(stderr, "%s\n", headport_last_error());
    return 1;
  }
  headport_options options;
  headport_options_init(generator, &options, sizeof options);
  options.max_new_tokens = 8;
  const int64_t ids[] = {5, 9, 2};
  const headport_ids prompt = {ids, 3};
  headport_replies* replies = NULL;
  const headport_status status = headport_generate(generator, &prompt, 1, &options, &replies);
  headport_reply reply;
  if (status == HEADPORT_OK) headport_replies_get(replies, 0, &reply, sizeof reply);
  for (size_t n = 0; status == HEADPORT_OK && n < reply.token_ids.count; ++n) {
    printf("%lld ", (long long)reply.token_ids.ids[n]);
  }
  headport_replies_free(replies);
  headport_close(generator);
  return status == HEADPORT_OK ? 0 : 1;
}
