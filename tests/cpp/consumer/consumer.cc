#include <headport/headport.hpp>
#include <iostream>

int main(int count, char** arguments) {
  if (count != 2) return 2;
  headport::Generator generator(arguments[1]);
  headport::Options options = generator.options();
  options.max_new_tokens = 8;
  for (const auto& reply : generator.generate({{5, 9, 2}}, options)) {
    for (auto id : reply.token_ids) std::cout << id << ' ';
  }
}
